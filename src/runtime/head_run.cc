#include "runtime/head_run.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <type_traits>

#include "cpu/storage.h"
#include "runtime/head_products.h"
#include "runtime/head_row.h"
#include "runtime/head_scalars.h"
#include "runtime/head_strip.h"

namespace ullage::lossk {
namespace {

enum class Phase {
  kBoth,        // statistics and the gradient that follows from them
  kStatistics,  // of every row, where a gradient waits for whole segments
  kGradient,
};

// Rows are handed to threads some at a time: enough columns to be worth a claim.
constexpr int64_t kColumnsPerTask = 1 << 15;

template <class T>
class HeadRun {
  static constexpr DType kType = std::is_same_v<T, double> ? DType::kF64 : DType::kF32;

 public:
  HeadRun(const HeadLayout& layout, const Inputs& inputs, const Outputs& outputs,
          std::span<std::byte> workspace, cpu::WorkerPool& pool)
      : layout_(layout),
        inputs_(inputs),
        outputs_(outputs),
        workspace_(workspace),
        pool_(pool),
        scalars_(layout, inputs, slot(layout.slots.statistics)),
        products_(layout, inputs, outputs, workspace, pool),
        context_{.layout = layout,
                 .inputs = inputs,
                 .scalars = scalars_,
                 .kernels = cpu::row_kernels<T>(),
                 .bias = nullptr,
                 .class_weights = nullptr,
                 .scratch = {},
                 .base_outputs = outputs.lse || outputs.label_log_prob || outputs.entropy ||
                                 outputs.shift || outputs.log_sum || outputs.distance,
                 .entropy = static_cast<bool>(outputs.entropy),
                 .metrics = !outputs.policy_metrics.empty(),
                 .single_sweep = false} {
    const auto scratch = slot(layout.slots.scratch);
    context_.scratch = {reinterpret_cast<T*>(scratch.data()), scratch.size() / sizeof(T)};
    T* const columns = reinterpret_cast<T*>(slot(layout.slots.columns).data());
    const int64_t vocab = layout.shape.vocab;
    if (layout.config.options.bias) context_.bias = fill(columns, inputs.bias);
    if (layout.smoothing && inputs.class_weights) {
      context_.class_weights = fill(columns + vocab, inputs.class_weights);
    }
    int sweeps = 0;
    for (int group = 0; group < static_cast<int>(layout.groups.size()); ++group) {
      sweeps += context_.needs(group);
    }
    context_.single_sweep =
        sweeps == 1 && !layout.reads_row_again && !context_.entropy && !context_.metrics;
  }

  void run() {
    const bool gradient = outputs_.d_logits || outputs_.d_hidden || outputs_.d_weight ||
                          outputs_.d_bias || outputs_.d_adapter_a || outputs_.d_adapter_b;
    std::fill(outputs_.argmax.begin(), outputs_.argmax.end(), -1);
    std::fill(outputs_.correct.begin(), outputs_.correct.end(), uint8_t{0});
    if (inputs_.group_shift) {
      // A shard's group has been over the rows.
      for (const int64_t row : scalars_.live_rows()) scalars_.finish_row(row);
      scalars_.finish_segments();
      if (gradient) sweep(Phase::kGradient, gradient);
    } else if (gradient && layout_.two_pass) {
      sweep(Phase::kStatistics, gradient);
      scalars_.finish_segments();
      sweep(Phase::kGradient, gradient);
    } else {
      sweep(Phase::kBoth, gradient);
      scalars_.finish_segments();
    }
    products_.finish();
    scalars_.report(outputs_);
    if (outputs_.d_logits) clear_ignored(outputs_.d_logits);
    if (outputs_.d_hidden) clear_ignored(outputs_.d_hidden);
  }

 private:
  std::span<std::byte> slot(const Slot& s) const {
    assert(s.offset + s.bytes <= layout_.workspace_bytes && "a slot outside what was booked");
    return workspace_.subspan(static_cast<size_t>(s.offset), static_cast<size_t>(s.bytes));
  }

  const T* fill(T* to, const VectorView& from) const {
    for (int64_t j = 0; j < from.size; ++j) to[j] = static_cast<T>(cpu::value_at(from, j));
    return to;
  }

  template <class View>
  static auto* row_of(const View& m, int64_t row) {
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(m.data)>>,
                                    const std::byte, std::byte>;
    return static_cast<Byte*>(m.data) + row * (m.rows <= 1 ? 0 : m.row_stride) * size_of(m.dtype);
  }

  void clear_ignored(const MutableMatrixView& m) const {
    if (outputs_.accumulate) return;
    const auto live = scalars_.live_rows();
    auto next = live.begin();
    for (int64_t row = 0; row < m.rows; ++row) {
      if (next != live.end() && *next == row) {
        ++next;
      } else {
        std::memset(row_of(m, row), 0, static_cast<size_t>(m.cols * size_of(m.dtype)));
      }
    }
  }

  // Every row that is not ignored, a chunk at a time where logits are made.
  void sweep(Phase phase, bool gradient) {
    const auto live = scalars_.live_rows();
    const auto chunk = static_cast<size_t>(layout_.chunk);
    for (size_t begin = 0; begin < live.size(); begin += chunk) {
      const auto rows = live.subspan(begin, std::min(chunk, live.size() - begin));
      if (layout_.strips()) {
        if (phase != Phase::kGradient) visit_strips(rows, Phase::kStatistics);
        if (gradient && phase != Phase::kStatistics) visit_strips(rows, Phase::kGradient);
        continue;
      }
      const ColumnRange all{0, layout_.shape.vocab};
      // A single chunk still holds its logits from the statistics.
      const bool held = phase == Phase::kGradient && live.size() <= chunk && !inputs_.group_shift;
      if (layout_.makes_logits() && !held) {
        products_.make_logits(rows, all);
      }
      visit(rows, phase, gradient);
      if (layout_.from_hidden() && gradient && phase != Phase::kStatistics) {
        products_.add_gradients(rows, all);
      }
    }
  }

  // One phase of a chunk, whose logits are made a strip of columns at a time.
  void visit_strips(std::span<const int64_t> rows, Phase phase) {
    const int64_t vocab = layout_.shape.vocab;
    const bool argmax = !outputs_.argmax.empty() || !outputs_.correct.empty();
    auto* const best = reinterpret_cast<RowBest*>(slot(layout_.slots.best).data());
    for (int64_t begin = 0; begin < vocab; begin += layout_.strip) {
      const ColumnRange columns{begin, std::min(layout_.strip, vocab - begin)};
      products_.make_logits(rows, columns);
      in_tasks(static_cast<int64_t>(rows.size()), columns.count, [&](int64_t i, int worker) {
        const int64_t row = rows[static_cast<size_t>(i)];
        HeadStrip<T> strip(context_, row, worker, columns, products_.logits() + i * columns.count);
        if (phase == Phase::kGradient) return strip.gradient();
        strip.statistics(argmax ? best + i : nullptr);
        if (columns.end() < vocab) return;
        if (argmax) report_argmax(row, best[i].column);
        scalars_.finish_row(row);
      });
      if (phase == Phase::kGradient) products_.add_gradients(rows, columns);
    }
  }

  // work(i, worker) for rows i of `columns` columns each.
  template <class Work>
  void in_tasks(int64_t count, int64_t columns, Work&& work) {
    const int64_t per_task = std::max<int64_t>(1, kColumnsPerTask / columns);
    pool_.run((count + per_task - 1) / per_task, [&](int64_t task, int worker) {
      for (int64_t i = task * per_task; i < std::min(count, (task + 1) * per_task); ++i) {
        work(i, worker);
      }
    });
  }

  void visit(std::span<const int64_t> rows, Phase phase, bool gradient) {
    const auto count = static_cast<int64_t>(rows.size());
    in_tasks(count, layout_.shape.vocab, [&](int64_t i, int worker) {
      const int64_t row = rows[static_cast<size_t>(i)];
      const auto teachers = [&](size_t teacher) { return teacher_row(teacher, row, i); };
      HeadRow<T> head(context_, row, worker, logits_row(row, i), teachers);
      const RowTarget target = gradient ? gradient_row(row, i) : RowTarget{};
      if (phase != Phase::kGradient) {
        const bool argmax = !outputs_.argmax.empty() || !outputs_.correct.empty();
        if (argmax) report_argmax(row, head.argmax());
        head.statistics(gradient && phase == Phase::kBoth ? &target : nullptr);
        scalars_.finish_row(row);
      }
      if (gradient && phase != Phase::kStatistics) head.gradient(target);
    });
  }

  // Row `row` of the batch, which is row i of its chunk.
  RowView logits_row(int64_t row, int64_t i) const {
    if (!layout_.from_hidden()) return {row_of(inputs_.logits, row), inputs_.logits.dtype};
    return {products_.logits() + i * layout_.shape.vocab, kType};
  }
  RowTarget gradient_row(int64_t row, int64_t i) const {
    if (layout_.from_hidden()) {
      return {products_.logits() + i * layout_.shape.vocab, kType, false};
    }
    return {row_of(outputs_.d_logits, row), outputs_.d_logits.dtype, outputs_.accumulate};
  }
  RowView teacher_row(size_t t, int64_t row, int64_t i) const {
    const Teacher& teacher = layout_.config.teachers[t];
    if (teacher.kind == TeacherKind::kLogits) {
      const MatrixView& m = inputs_.teachers[t].logits;
      return {row_of(m, row), m.dtype};
    }
    const DType made = teacher.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    const auto* const first = static_cast<const std::byte*>(products_.teacher_logits(t));
    return {first + i * layout_.shape.vocab * size_of(made), made};
  }

  void report_argmax(int64_t row, int64_t column) const {
    if (!scalars_.reports(row)) return;
    const auto i = static_cast<size_t>(row);
    if (!outputs_.argmax.empty()) outputs_.argmax[i] = column;
    if (!outputs_.correct.empty()) {
      outputs_.correct[i] = column >= 0 && column == scalars_.label(row);
    }
  }

  const HeadLayout& layout_;
  const Inputs& inputs_;
  const Outputs& outputs_;
  std::span<std::byte> workspace_;
  cpu::WorkerPool& pool_;
  HeadScalars scalars_;
  HeadProducts<T> products_;
  RowContext<T> context_;
};

}  // namespace

void run_head(const HeadLayout& layout, const Inputs& inputs, const Outputs& outputs,
              std::span<std::byte> workspace, cpu::WorkerPool& pool) {
  if (layout.accumulate == DType::kF64) {
    HeadRun<double>(layout, inputs, outputs, workspace, pool).run();
  } else {
    HeadRun<float>(layout, inputs, outputs, workspace, pool).run();
  }
}

}  // namespace ullage::lossk
