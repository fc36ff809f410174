// head_rows_sm90_cluster: the blocks of a cluster keep rows in shared memory, each its run of
// strips of `slots` rows. One read of the logits (and of the teacher), one write of the gradient.
//
//   the load warp       bulk copies of the rows to come, each as soon as its slot is free
//   16 column warps     each its span of strips: the sums of the next row -> the block's table; the
//                       gradient of this row, from shared memory to global; the extras of the next
//                       row, where some are asked for
//   the send warp       strips to sections -> every block's table; of a block alone, the terms'
//                       warp makes the sections
//   the terms' warp     sections to the row's sums -> terms -> RowWord, and the row's outputs
//
// So while sums travel, the column warps write the gradient of the row before: nobody waits for a
// row's terms in steady state.
//
// Tables, words and their barriers alternate between rows. A row's sums are formed after the block
// has the words of the row before last, so a table of strips and a word are free again two rows
// later. A row's sections are sent after the block has the words of the row before. Hence a table
// of sections is free again three rows later: a block that then sends has the words of the row one
// after, which every block had a part in once it was done with the row itself. Extras are formed
// after every block has sent the row's sums: two rows later.
#pragma once

#include "cuda/head_logits/row_process.cuh"
#include "cuda/head_logits/row_vectors.cuh"

namespace ullage::lossk::cuda {

#if ULLAGE_SM90

namespace ptx = ullage::cuda::ptx;

static_assert(sizeof(RowWord) == kRowWordBytes);

// Columns in shared memory, where the first lies `shift` columns into a 16-byte word; 0 where
// kAligned.
template <class T, bool kAligned_>
struct KeptStrip {
  static constexpr bool kAligned = kAligned_, kKept = true;
  const T* data;  // the word's first column
  int shift;

  // Eight from the `i`-th of the first word on, a multiple of eight.
  __device__ Vector<T> words_at(int i) const {
    Vector<T> v;
#pragma unroll
    for (int w = 0; w < kWordsOf<T>; ++w) {
      v.words[w] = reinterpret_cast<const uint4*>(data + i)[w];
    }
    return v;
  }
  __device__ Vector<T> load(int column) const {
    if constexpr (kAligned) return words_at(column);
    return load_shifted(data + column, shift);
  }
  __device__ Vector<T> load_tail(int column, int columns) const {
    Vector<T> v = load(column);
    if (column + kLaneColumns > columns) blank_from(v, columns - column);
    return v;
  }
};

// The block's shared memory, in the order of layout_of (config.h):
// slots | strips' sums of two rows | sections' sums of three rows | strips' extras | sections'
// extras of two rows | words of two rows | barriers. Without extras their tables take no room.
template <class Kind>
struct ClusterShared {
  static constexpr int kSumKinds = kSums<Kind::kFamily>, kExtraKinds = kExtras<Kind::kFamily>;

  const HeadParams& p;
  std::byte* base;
  bool has_extras;
  int warps;                       // of columns
  uint32_t slots_start, barriers;  // their shared addresses

  __device__ std::byte* slot(int i) const { return base + int64_t{i} * p.slot_bytes; }
  __device__ float* sums(unsigned n) const {
    return reinterpret_cast<float*>(base + int64_t{p.slots} * p.slot_bytes) +
           n % 2 * kSumKinds * p.strips_per_block;
  }
  __device__ float* section_sums(int table) const {
    return sums(0) + 2 * kSumKinds * p.strips_per_block + table * kSumKinds * kMaxSections;
  }
  __device__ float* extras() const { return section_sums(kSectionTables); }
  __device__ float* section_extras(unsigned n) const {
    return extras() + kExtraKinds * p.strips_per_block + n % 2 * kExtraKinds * kMaxSections;
  }
  __device__ RowWord* word(unsigned n) const {
    return reinterpret_cast<RowWord*>(base + int64_t{p.slots} * p.slot_bytes + p.table_bytes) +
           n % 2;
  }
  __device__ uint32_t barrier(unsigned i) const { return barriers + i * 8; }
  __device__ uint32_t sections_there(int table) const { return barrier(table); }
  __device__ uint32_t sums_there(unsigned n) const { return barrier(3 + n % 2); }
  __device__ uint32_t word_there(unsigned n) const { return barrier(5 + n % 2); }
  __device__ uint32_t section_extras_there(unsigned n) const { return barrier(7 + n % 2); }
  __device__ uint32_t extras_there() const { return barrier(9); }
  __device__ uint32_t row_sums_there() const { return barrier(10); }
  // Of a slot: its row has come; every warp is done with it.
  __device__ uint32_t loaded(int slot) const { return barrier(11 + slot); }
  __device__ uint32_t emptied(int slot) const { return barrier(11 + p.slots + slot); }

  // Every lane that read what is overwritten, or wrote what is read, arrives itself.
  __device__ void init_barriers() const {
    for (int table = 0; table < kSectionTables; ++table) {
      ptx::barrier_init(sections_there(table), 1);
    }
    for (unsigned n = 0; n < 2; ++n) {
      ptx::barrier_init(sums_there(n), warps * 32);
      ptx::barrier_init(word_there(n), 1);
      ptx::barrier_init(section_extras_there(n), 1);
    }
    ptx::barrier_init(extras_there(), warps * 32);
    ptx::barrier_init(row_sums_there(), 1);
    for (int slot = 0; slot < p.slots; ++slot) {
      ptx::barrier_init(loaded(slot), 32);
      ptx::barrier_init(emptied(slot), warps * 32);
    }
    ptx::fence_barrier_init();
    ptx::fence_async_shared();
  }
};

// Rows first, first + stride, ... of a cluster, counted from 0.
struct ClusterRowsOf {
  int64_t first, stride;
  int count;

  explicit __device__ ClusterRowsOf(const HeadParams& p)
      : first(p.first_row + ptx::cluster_id()), stride(ptx::n_clusters()) {
    count = first < end_row(p) ? static_cast<int>((end_row(p) - first + stride - 1) / stride) : 0;
  }
  __device__ int64_t row(int i) const { return first + i * stride; }
};

// Which of a cluster's rows count: a warp looks at 32 of them at a time, ascending.
class RowCounts {
 public:
  // Called for every row i, ascending, by the whole warp.
  __device__ bool next(const HeadParams& p, const ClusterRowsOf& rows, int i, int lane) {
    if (i % 32 == 0) {
      const int mine = i + lane;
      bits_ = __ballot_sync(
          ~0u, mine < rows.count && row_counts(p, rows.row(mine), stored_label(p, rows.row(mine))));
    }
    return bits_ >> (i % 32) & 1;
  }

 private:
  unsigned bits_ = 0;
};

// An element of this block's slice of the cluster's first row.
__device__ inline int64_t first_element(const HeadParams& p, const ClusterRowsOf& rows,
                                        int64_t row_stride, int column) {
  return (rows.first - p.first_row) * row_stride + column;
}

// A place in a ring, and the parity of its barriers.
struct RingCursor {
  int at = 0;
  uint32_t parity = 0;

  __device__ void advance(int places) {
    if (++at == places) at = 0, parity ^= 1;
  }
};

// The warp that loads the block's slices of rows.
template <class Kind>
class LoadWarp {
  using T = typename Kind::Element;

 public:
  __device__ LoadWarp(const ClusterShared<Kind>& shared, const ClusterRowsOf& rows, int lane)
      : p_(shared.p), shared_(shared), rows_(rows), lane_(lane) {
    const int first = static_cast<int>(ptx::cluster_rank()) * p_.strips_per_block;
    const int column = first_column(p_, first);
    columns_ = columns_between(p_, first, first + p_.strips_per_block);
    const auto slice = [&](const void* data, int64_t row_stride) {
      return static_cast<const T*>(data) + first_element(p_, rows, row_stride, column);
    };
    student_ = slice(p_.logits, p_.logits_stride);
    if (Kind::kHasTeacher) teacher_ = slice(p_.teacher, p_.teacher_stride);
  }

  __device__ void run() {
    RowCounts counts;
    RingCursor slot;
    for (int i = 0; i < rows_.count; ++i) {
      if (i >= p_.slots) ptx::barrier_wait(shared_.emptied(slot.at), slot.parity ^ 1);
      const uint32_t barrier = shared_.loaded(slot.at);
      uint32_t bytes = 0;
      if (counts.next(p_, rows_, i, lane_)) {
        const int offset = slot.at * p_.slot_bytes;
        bytes = load(student_, offset, barrier);
        if (Kind::kHasTeacher) bytes += load(teacher_, offset + p_.matrix_bytes, barrier);
      }
      if (lane_ == 0) {
        ptx::barrier_expect(barrier, bytes);
      } else {
        ptx::barrier_arrive(barrier);
      }
      __syncwarp();
      student_ += rows_.stride * p_.logits_stride;
      if (Kind::kHasTeacher) teacher_ += rows_.stride * p_.teacher_stride;
      slot.advance(p_.slots);
    }
  }

 private:
  // A slice to `offset` of the block's shared memory: whole 16-byte words by the copy engine, and
  // by the lanes the ends, whose words may reach beyond what is the caller's. Returns the bytes
  // that the engine counts on the barrier.
  __device__ uint32_t load(const T* slice, int offset, uint32_t barrier) const {
    constexpr int kPerWord = 16 / sizeof(T);
    const auto shift = static_cast<int>(reinterpret_cast<uintptr_t>(slice) % 16 / sizeof(T));
    const int head = min((kPerWord - shift) % kPerWord, columns_);
    const int body = (columns_ - head) / kPerWord * kPerWord;
    const auto bytes = static_cast<uint32_t>(body * sizeof(T));
    if (lane_ == 0 && bytes > 0) {
      const uint32_t to = shared_.slots_start + offset + (shift + head) * sizeof(T);
      ptx::bulk_load(to, slice + head, bytes, barrier);
    }
    if (!p_.in_whole_words) {
      T* const to = reinterpret_cast<T*>(shared_.base + offset) + shift;
      const int tail = head + body + lane_ - kPerWord;
      if (lane_ < head) to[lane_] = slice[lane_];
      if (lane_ >= kPerWord && tail < columns_) to[tail] = slice[tail];
    }
    return bytes;
  }

  const HeadParams& p_;
  const ClusterShared<Kind>& shared_;
  const ClusterRowsOf& rows_;
  int lane_;
  int columns_;
  const T *student_, *teacher_ = nullptr;  // the next row's slices
};

// One column warp.
template <class Kind>
class ColumnWarp {
  using T = typename Kind::Element;

 public:
  __device__ ColumnWarp(const ClusterShared<Kind>& shared, const ClusterRowsOf& rows, int warp,
                        int lane)
      : p_(shared.p), shared_(shared), rows_(rows), lane_(lane) {
    const int block_first = static_cast<int>(ptx::cluster_rank()) * p_.strips_per_block;
    local_first_ = warp * p_.strips_per_warp;
    first_ = block_first + local_first_;
    column_ = first_column(p_, first_);
    columns_ = columns_between(p_, first_, first_ + p_.strips_per_warp);
    const int block_column = first_column(p_, block_first);
    offset_ = (column_ - block_column) * static_cast<int>(sizeof(T));
    shift_ = Shift(p_.logits, p_.logits_stride, rows, p_, block_column);
    if (Kind::kHasTeacher) {
      teacher_shift_ = Shift(p_.teacher, p_.teacher_stride, rows, p_, block_column);
    }
    to_write_ = static_cast<T*>(p_.gradient) + first_element(p_, rows, p_.gradient_stride, column_);
    write_step_ = rows.stride * p_.gradient_stride;
  }

  __device__ void run() {
    const bool second = shared_.has_extras;
    // Nothing is left to do with a row once it is summed.
    const bool sums_only = p_.gradient == nullptr && !second;
    RowCounts counts;
    RingCursor now, before;                // slots of rows i and i - 1
    unsigned n_summed = 0, n_written = 0;  // rows that count
    bool counted = false, counted_before = false;
    for (int i = 0; i <= rows_.count; ++i) {
      counted_before = counted;
      counted = i < rows_.count && counts.next(p_, rows_, i, lane_);
      if (counted) {
        // The table of the row before last is free.
        if (sums_only && n_summed >= 2) wait_for_word(n_summed - 2);
        sum(now, i, n_summed);
      }
      if (sums_only) {
        n_summed += counted;
        ptx::barrier_arrive(shared_.emptied(now.at));
        now.advance(p_.slots);
        continue;
      }
      if (i > 0) {
        if (counted_before) {
          wait_for_word(n_written);
          if (p_.gradient != nullptr) write(before, i - 1, n_written);
          ++n_written;
        } else {
          ptx::wait_for_previous_kernel();
          clear_gradient(p_, to_write_, columns_, lane_);
        }
        to_write_ += write_step_;
        ptx::barrier_arrive(shared_.emptied(before.at));
        before.advance(p_.slots);
      }
      if (counted) {
        if (second) sum_extras(now, i, n_summed);
        ++n_summed;
      }
      now.advance(p_.slots);
    }
  }

 private:
  // How far into a 16-byte word a slice of row i starts, in columns.
  struct Shift {
    unsigned first = 0, step = 0;

    Shift() = default;
    __device__ Shift(const void* data, int64_t row_stride, const ClusterRowsOf& rows,
                     const HeadParams& p, int column)
        : first(static_cast<unsigned>(reinterpret_cast<uintptr_t>(data) / sizeof(T) +
                                      first_element(p, rows, row_stride, column))),
          step(static_cast<unsigned>(rows.stride * row_stride)) {}
    __device__ int of_row(int i) const {
      return static_cast<int>((first + step * static_cast<unsigned>(i)) % (16 / sizeof(T)));
    }
  };

  __device__ void wait_for_word(unsigned n) const {
    ptx::barrier_wait(shared_.word_there(n), n / 2 % 2);
  }

  // Calls act(student, teacher) with row i's columns in a slot, from column `from` of the span on.
  template <class Act>
  __device__ void with_columns(int slot, int i, int from, const Act& act) const {
    const T* const at = reinterpret_cast<const T*>(shared_.slot(slot) + offset_) + from;
    const T* const teacher = at + p_.matrix_bytes / sizeof(T);
    if (p_.in_whole_words) {
      act(KeptStrip<T, true>{at, 0}, KeptStrip<T, true>{teacher, 0});
    } else {
      act(KeptStrip<T, false>{at, shift_.of_row(i)},
          KeptStrip<T, false>{teacher, teacher_shift_.of_row(i)});
    }
  }

  // Calls act(strip of the block, student, teacher, columns, first column) for each of the span.
  template <class Act>
  __device__ void for_each_strip(int slot, int i, const Act& act) const {
    int column = column_;
    for (int s = 0; s < p_.strips_per_warp; ++s) {
      const int end =
          s + 1 < p_.strips_per_warp ? first_column(p_, first_ + s + 1) : column_ + columns_;
      with_columns(slot, i, column - column_, [&](const auto& student, const auto& teacher) {
        act(local_first_ + s, student, teacher, end - column, column);
      });
      column = end;
    }
  }

  __device__ void write(const RingCursor& slot, int i, unsigned n) {
    with_columns(slot.at, i, 0, [&](const auto& student, const auto& teacher) {
      write_gradient<Kind>(p_, student, teacher, columns_, to_write_, column_, *shared_.word(n),
                           lane_);
    });
  }

  // `n`: of the rows that count, this is the n-th.
  __device__ void sum(const RingCursor& slot, int i, unsigned n) {
    ptx::barrier_wait(shared_.loaded(slot.at), slot.parity);
    for_each_strip(
        slot.at, i, [&](int s, const auto& student, const auto& teacher, int columns, int) {
          const StripSums<Kind> strip = strip_sums<Kind>(p_, student, teacher, columns, lane_);
          if (lane_ == 0) put_sums(shared_.sums(n), p_.strips_per_block, s, strip);
        });
    ptx::barrier_arrive(shared_.sums_there(n));
  }
  __device__ void sum_extras(const RingCursor& slot, int i, unsigned n) {
    ptx::barrier_wait(shared_.row_sums_there(), n % 2);
    const RowSums row = shared_.word(n)->sums;
    for_each_strip(slot.at, i,
                   [&](int s, const auto& student, const auto& teacher, int columns, int column) {
                     put_strip_extras<Kind>(p_, shared_.extras(), p_.strips_per_block, s, student,
                                            teacher, columns, column, row, lane_);
                   });
    ptx::barrier_arrive(shared_.extras_there());
  }

  const HeadParams& p_;
  const ClusterShared<Kind>& shared_;
  const ClusterRowsOf& rows_;
  int lane_;
  int first_, local_first_;      // strip, of the row and of the block
  int column_, columns_;         // the span's
  int offset_;                   // of the span in a matrix of a slot, bytes
  Shift shift_, teacher_shift_;  // where rows are not in whole words
  T* to_write_;                  // the span in the next row to be written
  int64_t write_step_;           // elements to the cluster's next row
};

// The warp that sends the block's sections to every block of the cluster.
template <class Kind>
class SendWarp {
 public:
  __device__ SendWarp(const ClusterShared<Kind>& shared, const ClusterRowsOf& rows, int lane)
      : p_(shared.p),
        shared_(shared),
        rows_(rows),
        lane_(lane),
        n_sections_(p_.cut.n_strips / p_.cut.strips_per_section),
        sections_here_(min(p_.strips_per_block, 32) / p_.cut.strips_per_section) {
    const int block = lane / sections_here_, section = lane % sections_here_;
    const int block_sections = p_.strips_per_block / p_.cut.strips_per_section;
    const uint32_t here = shared.slots_start;
    sends_ = block < static_cast<int>(ptx::cluster_size());
    from_lane_ = section * p_.cut.strips_per_section;
    // (The instruction is executed whether its result is used or not: a block that exists.)
    to_barrier_ = ptx::address_in_block(here, sends_ ? block : 0) - here;
    to_block_ = to_barrier_ + (ptx::cluster_rank() * block_sections + section) * 4;
  }

  __device__ void run() {
    RowCounts counts;
    RingCursor table;
    unsigned n = 0;  // of the rows that count
    for (int i = 0; i < rows_.count; ++i) {
      if (!counts.next(p_, rows_, i, lane_)) continue;
      if (n > 0) ptx::barrier_wait(shared_.word_there(n - 1), (n - 1) / 2 % 2);
      ptx::barrier_wait(shared_.sums_there(n), n / 2 % 2);
      send_sums(n, table.at);
      if (shared_.has_extras) {
        ptx::barrier_wait(shared_.extras_there(), n % 2);
        send_extras(n);
      }
      table.advance(kSectionTables);
      ++n;
    }
  }

 private:
  __device__ void send_sums(unsigned n, int table) const {
    constexpr int kKinds = kSums<Kind::kFamily>;
    send<kKinds>(shared_.section_sums(table), shared_.sections_there(table),
                 [&](int i, float(&v)[kKinds]) {
                   const StripSums<Kind> s = section_sums<Kind>(
                       p_, shared_.sums(n), p_.strips_per_block, i, p_.cut.strips_per_section);
                   v[kMax] = s.max, v[kSum] = s.sums.sum;
                   if constexpr (Kind::kHasTeacher) {
                     v[kTeacherMax] = s.teacher_max, v[kTeacherSum] = s.sums.teacher_sum;
                   }
                   if constexpr (kKinds > kLogSum) v[kLogSum] = s.sums.log_sum;
                 });
  }
  __device__ void send_extras(unsigned n) const {
    constexpr int kKinds = kExtras<Kind::kFamily>;
    send<kKinds>(shared_.section_extras(n), shared_.section_extras_there(n),
                 [&](int i, float(&v)[kKinds]) {
#pragma unroll
                   for (int kind = 0; kind < kKinds; ++kind) {
                     v[kind] = section_extra(shared_.extras(), p_.strips_per_block, kind, i,
                                             p_.cut.strips_per_section);
                   }
                 });
  }

  // A lane a section and a block, of each 32 strips. `sections(i, values)`: of the section of
  // strip i, a lane each.
  template <int kKinds, class Sections>
  __device__ void send(const float* table, uint32_t barrier, const Sections& sections) const {
    if (lane_ == 0) ptx::barrier_expect(barrier, kKinds * n_sections_ * 4);
    uint32_t to = ptx::shared_address(table) + to_block_;
    for (int base = 0; base < p_.strips_per_block; base += 32, to += sections_here_ * 4) {
      float mine[kKinds];
      sections(base + lane_, mine);
#pragma unroll
      for (int kind = 0; kind < kKinds; ++kind) {
        const float value = __shfl_sync(~0u, mine[kind], from_lane_);
        if (sends_) {
          ptx::store_in_block(to + kind * kMaxSections * 4, value, barrier + to_barrier_);
        }
      }
    }
    __syncwarp();
  }

  const HeadParams& p_;
  const ClusterShared<Kind>& shared_;
  const ClusterRowsOf& rows_;
  int lane_;
  int n_sections_;
  int sections_here_;  // of a group of 32 strips
  // Of this lane: whether it sends, the lane it takes values from, and how far its slot and its
  // barrier in the other block lie from this block's.
  bool sends_;
  int from_lane_;
  uint32_t to_block_, to_barrier_;
};

// The warp that evaluates the terms.
template <class Kind>
class TermsWarp {
  using T = typename Kind::Element;

 public:
  __device__ TermsWarp(const ClusterShared<Kind>& shared, const ClusterRowsOf& rows, int lane)
      : p_(shared.p),
        shared_(shared),
        rows_(rows),
        lane_(lane),
        writes_(ptx::cluster_rank() == 0),
        is_alone_(ptx::cluster_size() == 1),
        n_sections_(p_.cut.n_strips / p_.cut.strips_per_section) {}

  __device__ void run() {
    const TermParams term = p_.terms[lane_ < p_.n_terms ? lane_ : 0];
    RowVectors<T> vectors(p_, lane_);
    const auto ask = [&](int i) {
      if (i < rows_.count) vectors.ask(rows_.row(i));
      if (i + 1 < rows_.count) vectors.look_ahead(rows_.row(i + 1));
    };
    if (rows_.count > 0) vectors.look_ahead(rows_.row(0));
    ask(0);
    ptx::wait_for_previous_kernel();
    const float gain = lane_ < p_.n_terms ? p_.census->gain[lane_] : 0.0f;
    RingCursor table;
    unsigned n = 0;  // of the rows that count
    for (int i = 0; i < rows_.count; ++i) {
      const bool counts = vectors.counts();
      const RowInputs in = vectors.inputs();
      ask(i + 1);
      if (counts) {
        evaluate(rows_.row(i), in, term, gain, table, n++);
        table.advance(kSectionTables);
      } else if (writes_) {
        clear_row(p_, rows_.row(i), lane_);
      }
    }
  }

 private:
  __device__ void evaluate(int64_t row, const RowInputs& in, const TermParams& term, float gain,
                           const RingCursor& table, unsigned n) {
    float* const sections = shared_.section_sums(table.at);
    // Also: every column warp is done with the word of the row before last.
    ptx::barrier_wait(shared_.sums_there(n), n / 2 % 2);
    if (is_alone_) {
      fold_strips<Kind>(p_, shared_.sums(n), p_.strips_per_block, sections, lane_);
    } else {
      ptx::barrier_wait(shared_.sections_there(table.at), table.parity);
    }
    RowSums sums = row_sums<Kind>(p_, sections, n_sections_, lane_);
    if (shared_.has_extras) {
      if (lane_ == 0) {
        shared_.word(n)->sums = sums;
        ptx::barrier_arrive(shared_.row_sums_there());
      }
      __syncwarp();
      if (is_alone_) {
        ptx::barrier_wait(shared_.extras_there(), n % 2);
        fold_extras<Kind>(p_, shared_.extras(), p_.strips_per_block, shared_.section_extras(n),
                          lane_);
      } else {
        ptx::barrier_wait(shared_.section_extras_there(n), n / 2 % 2);
      }
      add_extras<Kind>(shared_.section_extras(n), n_sections_, lane_, sums);
    }
    const FinishedRow done = finish_row<Kind>(p_, term, row, in, sums, gain, lane_, writes_);
    if (lane_ == 0) {
      *shared_.word(n) = done.word;
      ptx::barrier_arrive(shared_.word_there(n));
    }
    __syncwarp();
    if (writes_) write_finished_row<Kind>(p_, row, in, done, lane_);
  }

  const HeadParams& p_;
  const ClusterShared<Kind>& shared_;
  const ClusterRowsOf& rows_;
  int lane_;
  bool writes_;    // the row's outputs
  bool is_alone_;  // of its cluster
  int n_sections_;
};

#endif

template <class Kind>
__global__ void __launch_bounds__((kMaxColumnWarps + kOtherWarps) * 32, 1)
    cluster_rows(const __grid_constant__ HeadParams p) {
#if ULLAGE_SM90
  extern __shared__ __align__(128) std::byte cluster_shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t start = ptx::kept_shared_address(cluster_shared);
  const ClusterShared<Kind> shared{
      .p = p,
      .base = cluster_shared,
      .has_extras = Kind::kFamily == Family::kMixed || wants_extra(p),
      .warps = p.strips_per_block / p.strips_per_warp,
      .slots_start = start,
      .barriers = start + static_cast<uint32_t>(p.slots * p.slot_bytes + p.table_bytes +
                                                2 * kRowWordBytes)};
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();
  ptx::cluster_sync();  // every block's barriers are ready before a peer counts on them
  const ClusterRowsOf rows(p);
  if (warp < shared.warps) {
    ColumnWarp<Kind>(shared, rows, warp, lane).run();
  } else if (warp == shared.warps) {
    TermsWarp<Kind>(shared, rows, lane).run();
  } else if (warp == shared.warps + 1) {
    LoadWarp<Kind>(shared, rows, lane).run();
  } else {
    SendWarp<Kind>(shared, rows, lane).run();
  }
  __syncwarp();
  ptx::cluster_sync();  // a peer may still send to this block
#endif
}

struct ClusterRows {
  template <class Kind>
  static const void* of() {
    return reinterpret_cast<const void*>(&cluster_rows<Kind>);
  }
};

}  // namespace ullage::lossk::cuda
