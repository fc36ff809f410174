// A strip of columns of one row, for losses whose row needs no more than one sweep at a time: label
// losses over logits that are made strip by strip. The bits are those of whole rows (HeadRow).
#pragma once

#include <cstdint>

#include "runtime/head_row.h"

namespace ullage::lossk {

// Columns [begin, begin + count) of the vocabulary.
struct ColumnRange {
  int64_t begin = 0;
  int64_t count = 0;

  int64_t end() const { return begin + count; }
};

// The largest logit so far, where arg-max is asked for.
struct RowBest {
  double value;
  int64_t column;
};

template <class T>
class HeadStrip {
 public:
  // z: logits of the columns; overwritten. Strips of a row come in ascending order and are whole
  // blocks (cpu::kRowBlock) but for the last.
  HeadStrip(const RowContext<T>& context, int64_t row, int worker, ColumnRange columns, T* z)
      : c_(context), row_(row), worker_(worker), columns_(columns), z_(z) {
    const int64_t label = c_.scalars.label(row);
    label_ = label >= columns.begin && label < columns.end() ? label - columns.begin : -1;
  }

  // Continues the row's statistics; after the last strip they are complete. `best` may be null.
  void statistics(RowBest* best);

  // z becomes the gradient.
  void gradient();

 private:
  void make_effective();

  const RowContext<T>& c_;
  int64_t row_;
  int worker_;
  ColumnRange columns_;
  T* z_;
  int64_t label_;  // within the strip, or -1
};

extern template class HeadStrip<float>;
extern template class HeadStrip<double>;

}  // namespace ullage::lossk
