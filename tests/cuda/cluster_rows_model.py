#!/usr/bin/env python3
"""The barriers and exchanges of cluster_rows.cuh, warp by warp, under random schedulers: nobody waits for ever, and nothing is
read before it is written or after it is written over. Needs no GPU.

A warp is a generator that stops wherever another may go first; copies and remote stores arrive some time later. A change of
the protocol goes here first. usage: cluster_rows_model.py [RUNS]
"""

import random
import sys


class Hazard(Exception):
    pass


class Barrier:
    """An mbarrier: a phase ends when all have arrived and every expected byte has."""

    def __init__(self, arrivals):
        self.arrivals = self.pending = arrivals
        self.bytes = self.phase = 0

    def _settle(self):
        if self.pending < 0:
            raise Hazard("too many arrivals")
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.arrivals

    def arrive(self, expected=0):
        self.bytes += expected
        self.pending -= 1
        self._settle()

    def complete(self, n):
        self.bytes -= n
        self._settle()

    def has_ended(self, parity):
        return self.phase & 1 != parity


class Cursor:
    """RingCursor."""

    def __init__(self, places, at=0):
        self.places, self.at, self.parity = places, 0, 0
        self.advance(at)

    def advance(self, by=1):
        self.at += by
        while self.at >= self.places:
            self.at -= self.places
            self.parity ^= 1


class Block:
    def __init__(self, c):
        self.loaded = [Barrier(1) for _ in range(c.arrivals)]
        self.word_there = [Barrier(1) for _ in range(c.tables)]
        self.emptied = [Barrier(c.row_warps) for _ in range(c.slots)]
        self.sums_there = [Barrier(c.row_warps) for _ in range(c.tables)]
        self.sections_there = [Barrier(1) for _ in range(c.tables)]
        self.row_sums_there = [Barrier(1) for _ in range(c.groups)]
        self.extras_there = [Barrier(c.row_warps) for _ in range(c.groups)]
        self.section_extras_there = [Barrier(1) for _ in range(c.groups)]
        self.id_there = [Barrier(1) for _ in range(c.ids)]
        # Whose values lie there: the cluster's row.
        self.slot = [None] * c.slots
        self.row_sums, self.word = ([None] * c.tables for _ in range(2))
        self.sums = [[None] * c.row_warps for _ in range(c.tables)]
        self.sections = [[None] * c.blocks for _ in range(c.tables)]
        self.extras = [[None] * c.row_warps for _ in range(c.groups)]
        self.section_extras = [[None] * c.blocks for _ in range(c.groups)]
        self.id = [(None, None)] * c.ids  # row, whether it counts (None: there is no row)


class Cluster:
    def __init__(self, seed, blocks, groups, slots, tables, row_warps, rows, extras, gradient, sends_all=True):
        self.rng = random.Random(seed)
        self.blocks, self.groups, self.row_warps = blocks, groups, row_warps
        self.rows, self.has_extras, self.gradient, self.sends_all = rows, extras, gradient, sends_all
        self.slots, self.tables, self.ids = slots, tables * groups, 1
        self.ahead = min(2 * groups, slots)
        while blocks == 1 and self.tables < self.ahead + slots:
            self.tables *= 2
        # Extras of a family's own do, those that are asked for do not.
        self.looks_ahead = extras and slots >= 3 * groups and seed % 2 == 0
        self.arrivals = -(-slots // groups) * groups
        while self.ids < 2 * self.slots + self.tables:
            self.ids *= 2
        self.terms_warps = 3 if blocks == 1 else 2
        self.ends = max(groups, self.terms_warps)
        self.ends_told = 0
        self.block = [Block(self) for _ in range(blocks)]
        self.under_way = []  # what arrives later
        self.overwritten = set()  # rows whose gradient some block writes over their logits
        self.done = []       # (block, warp, row) written, (block, row) evaluated

    # What every warp does.

    @staticmethod
    def wait(barrier, parity):
        while not barrier.has_ended(parity):
            yield barrier, parity
        yield None

    def wait_for_word(self, x, i):
        yield from self.wait(x.word_there[self.table(i)], self.table_parity(i))

    def id(self, x, i):
        row, counts = x.id[i & self.ids - 1]
        expect(row == i, f"the id of row {i} is that of {row}")
        return counts

    def wait_for_id(self, x, i):
        yield from self.wait(x.id_there[i & self.ids - 1], int(i & self.ids != 0))
        return self.id(x, i)

    def table(self, i):
        return i & self.tables - 1

    def table_parity(self, i):
        return int(i & self.tables != 0)

    def extra(self, i):
        return i & self.groups - 1

    def extra_parity(self, i):
        return int(i & self.groups != 0)

    def read(self, values, i, what):
        """Not all at once."""
        for k in range(len(values)):
            expect(values[k] == i, f"{what} of row {i} are {values}")
            if self.rng.random() < 0.5:
                yield None

    # The warps.

    def tell(self, i):
        if self.ends_told == self.ends:
            return
        counts = self.rows[i] if i < len(self.rows) and self.ends_told == 0 else None
        self.ends_told += counts is None
        yield None

        def put(x, signal):
            x.id[i & self.ids - 1] = (i, counts)
            signal(x.id_there[i & self.ids - 1])

        for x in self.block:
            if self.blocks == 1:
                put(x, Barrier.arrive)
            else:
                self.under_way.append(lambda x=x: put(x, lambda barrier: barrier.complete(8)))
        yield None

    def load_warp(self, x, feeds):
        told_by_peer = self.blocks > 1
        for i in range(self.ids if told_by_peer else 0):
            x.id_there[i].arrive(expected=8)
        yield None
        for i in range(self.ahead if feeds else 0):
            yield from self.tell(i)
        slot, arrival, ends, i = Cursor(self.slots), Cursor(self.arrivals), 0, 0
        while ends < self.ends:
            counts = yield from self.wait_for_id(x, i)
            if told_by_peer:
                x.id_there[i & self.ids - 1].arrive(expected=8)
            ends += counts is None
            if ends <= self.groups:
                if i >= self.slots:
                    yield from self.wait(x.emptied[slot.at], slot.parity ^ 1)
                if counts:

                    def come(at=slot.at, signal=x.loaded[arrival.at], i=i):
                        x.slot[at] = i
                        signal.complete(1)

                    self.under_way.append(come)
                x.loaded[arrival.at].arrive(expected=1 if counts else 0)
                yield None
            if feeds:
                yield from self.tell(i + self.ahead)
            slot.advance()
            arrival.advance()
            i += 1

    def column_warp(self, x, group, warp):
        sums_only = not self.gradient and not self.has_extras
        slot, before, arrival = Cursor(self.slots, group), Cursor(self.slots, group), Cursor(self.arrivals, group)
        row_before, i = None, group
        while True:
            yield from self.wait(x.loaded[arrival.at], arrival.parity)
            arrival.advance(self.groups)
            counts = self.id(x, i)
            if sums_only:
                if counts is None:
                    return
                if i >= 2 * self.groups:
                    yield from self.wait_for_word(x, i - 2 * self.groups)
            if counts:
                yield from self.read([x.slot[slot.at]], i, "columns")
                expect(x.slot[slot.at] == i, f"row {i} is loaded over while it is summed")
                x.sums[self.table(i)][warp] = i
            if counts is not None:
                x.sums_there[self.table(i)].arrive()
            yield None
            if sums_only:
                x.emptied[slot.at].arrive()
            else:
                if row_before is not None:
                    yield from self.wait_for_word(x, row_before)
                    if self.gradient:
                        self.overwritten.add(row_before)
                        if self.rows[row_before]:
                            values = [x.word[self.table(row_before)], x.slot[before.at]]
                            yield from self.read(values, row_before, "word and columns")
                            expect(x.word[self.table(row_before)] == row_before, f"the word of row {row_before} is written over")
                            expect(x.slot[before.at] == row_before, f"row {row_before} is loaded over while it is written")
                        self.done.append((x, warp, row_before))
                    x.emptied[before.at].arrive()
                    before.advance(self.groups)
                    yield None
                if counts is None:
                    return
                if self.looks_ahead:  # the next row's maxima
                    yield from self.wait(x.loaded[arrival.at], arrival.parity)
                    if self.id(x, i + self.groups):
                        at = Cursor(self.slots, slot.at + self.groups).at
                        yield from self.read([x.slot[at]], i + self.groups, "columns")
                        expect(x.slot[at] == i + self.groups, f"row {i + self.groups} is loaded over while its maxima are looked for")
                if self.has_extras:
                    yield from self.wait(x.row_sums_there[self.extra(i)], self.extra_parity(i))
                    if counts:
                        yield from self.read([x.row_sums[self.table(i)]], i, "row sums")
                        x.extras[self.extra(i)][warp] = i
                    x.extras_there[self.extra(i)].arrive()
                    yield None
                row_before = i
            slot.advance(self.groups)
            i += self.groups

    def send(self, me, i, barriers, tables, at):
        getattr(self.block[me], barriers)[at].arrive(expected=self.blocks)
        yield None
        for peer in self.block:

            def come(peer=peer):
                getattr(peer, tables)[at][me] = i
                getattr(peer, barriers)[at].complete(1)

            self.under_way.append(come)
        yield None

    def send_warp(self, x, me):
        i = 0
        while True:
            counts = yield from self.wait_for_id(x, i)
            if counts is None:
                return
            yield None
            expect(i not in self.overwritten, f"the label's logit of row {i} is read after its gradient is written")
            if i >= self.tables // 2:
                yield from self.wait_for_word(x, i - self.tables // 2)
            yield from self.wait(x.sums_there[self.table(i)], self.table_parity(i))
            if counts:
                yield from self.read(x.sums[self.table(i)], i, "strips' sums")
            if counts or self.sends_all:
                yield from self.send(me, i, "sections_there", "sections", self.table(i))
            else:
                x.sections_there[self.table(i)].arrive()
            if self.has_extras:
                yield from self.wait(x.extras_there[self.extra(i)], self.extra_parity(i))
                if counts:
                    yield from self.read(x.extras[self.extra(i)], i, "strips' extras")
                if counts or self.sends_all:
                    yield from self.send(me, i, "section_extras_there", "section_extras", self.extra(i))
                else:
                    x.section_extras_there[self.extra(i)].arrive()
            i += 1

    def terms_warp(self, x, warp):
        is_alone = self.blocks == 1
        i = warp
        counts = yield from self.wait_for_id(x, i)
        while counts is not None:
            there = x.sums_there if is_alone else x.sections_there
            yield from self.wait(there[self.table(i)], self.table_parity(i))
            if counts:
                yield from self.read((x.sums if is_alone else x.sections)[self.table(i)], i, "sums")
            if self.has_extras:
                if counts:
                    x.row_sums[self.table(i)] = i
                    x.word[self.table(i)] = None  # of which the sums are a part
                x.row_sums_there[self.extra(i)].arrive()
                there = x.extras_there if is_alone else x.section_extras_there
                yield from self.wait(there[self.extra(i)], self.extra_parity(i))
                if counts:
                    yield from self.read((x.extras if is_alone else x.section_extras)[self.extra(i)], i, "extras")
            if counts:
                x.word[self.table(i)] = i
            x.word_there[self.table(i)].arrive()
            self.done.append((x, i))
            i += self.terms_warps
            counts = yield from self.wait_for_id(x, i)

    # The scheduler.

    def run(self):
        warps = []
        for me, x in enumerate(self.block):
            warps += [self.column_warp(x, group, warp) for group in range(self.groups) for warp in range(self.row_warps)]
            warps += [self.terms_warp(x, warp) for warp in range(self.terms_warps)]
            warps.append(self.load_warp(x, feeds=me == 0))
            warps += [self.send_warp(x, me)] if self.blocks > 1 else []
        waits_for = dict.fromkeys(warps)
        step = 0
        while waits_for:
            if step % 400 == 0:  # some warps are fast for a while, others slow
                pace = {warp: self.rng.choice([0.05, 1, 1, 1, 3, 10]) for warp in warps}
                arriving = self.rng.choice([0.02, 0.3, 0.8])
            step += 1
            ready = [warp for warp, what in waits_for.items() if what is None or what[0].has_ended(what[1])]
            if self.under_way and (not ready or self.rng.random() < arriving):
                self.under_way.pop(self.rng.randrange(len(self.under_way)))()
                continue
            expect(ready, "all wait")
            warp = self.rng.choices(ready, [pace[each] for each in ready])[0]
            try:
                waits_for[warp] = next(warp)
            except StopIteration:
                del waits_for[warp]
        expect(not self.under_way, "something arrives after its block has ended")
        once = [(x, i) for x in self.block for i in range(len(self.rows))]
        if self.gradient:
            once += [(x, warp, i) for x, i in once for warp in range(self.row_warps)]
        expect(len(self.done) == len(once) and set(self.done) == set(once), "a row is not taken once")


def expect(truth, otherwise):
    if not truth:
        raise Hazard(otherwise)


def drawn(seed):
    rng = random.Random(seed)
    share = rng.choice([0, 0, 0.1, 0.5, 0.9, 1])
    groups = rng.choice([1, 1, 1, 2, 4])
    gradient, extras = rng.random() < 0.6, rng.random() < 0.4
    return {
        "seed": seed,
        "blocks": rng.choice([1, 2, 2, 3, 4, 8]),
        "groups": groups,
        # Sums alone, too, are taken by a plan for gradients: the first launch of sequence losses.
        "slots": groups + rng.choice([1, 1, 2]) if not (gradient or extras) and rng.random() < 0.7 else rng.choice([2, 3, 3, 5]) * groups,
        "tables": 2 if extras else rng.choice([2, 4]),
        "row_warps": rng.choice([1, 2, 3]),
        "rows": [rng.random() >= share for _ in range(rng.choice([0, 1, 2, 3, 7, 30, 60]))],
        "extras": extras,
        "gradient": gradient,
    }


def hazards(runs, **change):
    found = []
    for seed in range(runs):
        case = drawn(seed)
        try:
            Cluster(**case, **change).run()
        except Hazard as hazard:
            found.append(f"{hazard}: {case}")
    return found


def main(arguments):
    runs = int(arguments[0]) if arguments else 400
    found = hazards(runs)
    print(*found[:5], sep="\n", end="\n" if found else "")
    # What went wrong on a device: rows that do not count were not exchanged, and blocks overtook each other through them.
    caught = hazards(runs // 4, sends_all=False)
    print(f"{runs} runs, {len(found)} hazards; without an exchange of rows that do not count: {len(caught)} in {runs // 4}")
    return 1 if found or not caught else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
