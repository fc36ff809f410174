// head_rows_sm90_cluster: the blocks of a cluster keep a row in shared memory, each its run of
// strips. One read of the logits (and of the teacher), one write of the gradient:
//
//   load         a bulk copy of each warp's span -> its mbarrier
//   reduce       each strip's maximum, then its sums -> every block's table, counted on its
//   mbarrier gradient     written over the span in shared memory, bulk-stored from there
//
// A warp loads, reduces and stores its own span of strips and meets the others only in the
// exchange: stores into the peers' shared memory that count themselves on the peers' barriers.
// Tables and barriers of the exchange alternate between rows: a peer can be one row ahead, when it
// stores for the next row while a warp here still reads this one's sums, but not two, for that
// takes this warp's own sums of the next. While one block waits, the others on the multiprocessor
// compute.
#pragma once

#include "cuda/head_logits/row_process.cuh"

namespace ullage::lossk::cuda {

#if ULLAGE_SM90

namespace ptx = ullage::cuda::ptx;

inline constexpr int kExchangeBarriers = 3;

template <class Kind>
struct ClusterStrips {
  using T = typename Kind::Element;

  const HeadParams& p;
  T* kept;             // this warp's span; the teacher's is teacher_offset further
  float* partials;     // [2][n_sums][kMaxStrips], [n_extras][kMaxStrips]
  uint32_t loads;      // this warp's barrier
  uint32_t exchanges;  // this block's barriers: sums of even and of odd rows, extras
  int first_strip, last_strip;
  int span_columns;
  int teacher_offset;  // elements
  int warp, lane;
  int n_working_warps;  // of the block, if it is the only one that has strips
  int n_blocks;         // of the cluster that have strips
  int64_t stride;       // rows between two of this cluster

  int64_t row = 0;          // at work or on its way, or the end
  RowInputs inputs = {};    // of that row
  int64_t label_ahead = 0;  // of the row after it, as stored
  unsigned rows_done = 0;
  bool gain_known = false;
  float lane_gain = 0;

  __device__ int first() const { return first_strip; }
  __device__ int last() const { return last_strip; }

  __device__ KeptStrip<T> student(int strip) const {
    return {kept + (strip - first_strip) * p.strip_columns, columns_of(p, strip)};
  }
  __device__ KeptStrip<T> teacher(int strip) const {
    return {kept + teacher_offset + (strip - first_strip) * p.strip_columns, columns_of(p, strip)};
  }
  __device__ KeptStrip<T> student_span() const { return {kept, span_columns}; }
  __device__ KeptStrip<T> teacher_span() const { return {kept + teacher_offset, span_columns}; }
  __device__ T* gradient_span() const { return kept; }
  __device__ bool gradient_aligned() const { return true; }

  __device__ float* sums(int which) const {
    const int table = static_cast<int>(rows_done % 2) * kSums<Kind::kFamily>;
    return partials + (table + which) * kMaxStrips;
  }
  __device__ float* extras(int which) const {
    return partials + (2 * kSums<Kind::kFamily> + which) * kMaxStrips;
  }
  __device__ uint32_t sums_barrier() const { return exchanges + rows_done % 2 * 8; }
  __device__ uint32_t extras_barrier() const { return exchanges + 16; }

  __device__ void publish(float* slot, float value, uint32_t barrier) {
    if (n_blocks == 1) {
      if (lane == 0) *slot = value;
    } else if (lane < n_blocks) {
      ptx::store_in_block(ptx::shared_address(slot), lane, value, barrier);
    }
  }
  __device__ void publish_sum(SumPartial which, int strip, float value) {
    publish(sums(which) + strip, value, sums_barrier());
  }
  __device__ void publish_extra(ExtraPartial which, int strip, float value) {
    publish(extras(which) + strip, value, extras_barrier());
  }
  __device__ void finish(uint32_t barrier, int values, uint32_t parity) {
    if (n_blocks == 1) {
      __syncwarp();
      ptx::sync_warps(n_working_warps * 32);
      return;
    }
    if (warp == 0 && lane == 0) ptx::barrier_expect(barrier, p.n_strips * values * 4);
    __syncwarp();
    ptx::barrier_wait(barrier, parity);
  }
  __device__ void finish_sums() { finish(sums_barrier(), kSums<Kind::kFamily>, rows_done / 2 % 2); }
  __device__ void finish_extras() {
    finish(extras_barrier(), (wants_extra(p) ? kCommonExtras : 0) + kMixedExtras<Kind::kFamily>,
           rows_done % 2);
  }

  __device__ float gain() {
    if (!gain_known) {
      ptx::wait_for_previous_kernel();
      lane_gain = lane < p.n_terms ? p.census->gain[lane] : 0.0f;
      gain_known = true;
    }
    return lane_gain;
  }

  // Finds the first row at or after `from` that must be read, and puts this warp's span of it and
  // its inputs on their way. `label`: of row `from`, as stored.
  __device__ void start_row(int64_t from, int64_t label) {
    row = from;
    while (row < end_row(p) && !row_counts(p, row, label)) {
      row += stride;
      label = row < end_row(p) ? stored_label(p, row) : -1;
    }
    if (row >= end_row(p)) return;
    const T* student = span_of(p.logits, p.logits_stride);
    int bytes = bulk_bytes(student);
    if constexpr (Kind::kHasTeacher) bytes += bulk_bytes(span_of(p.teacher, p.teacher_stride));
    if (lane == 0) ptx::barrier_expect(loads, bytes);
    load_span(kept, student);
    if constexpr (Kind::kHasTeacher) {
      load_span(kept + teacher_offset, span_of(p.teacher, p.teacher_stride));
    }
    inputs = load_row_inputs<T>(p, row, label);
    if (row + stride < end_row(p)) label_ahead = stored_label(p, row + stride);
    __syncwarp();
  }
  __device__ const T* span_of(const void* data, int64_t row_stride) const {
    return static_cast<const T*>(data) + (row - p.first_row) * row_stride +
           int64_t{first_strip} * p.strip_columns;
  }
  // What a bulk copy can move of this span: whole 16-byte words from a 16-byte boundary.
  __device__ int bulk_bytes(const T* global) const {
    return is_aligned(global) ? span_columns * static_cast<int>(sizeof(T)) & ~15 : 0;
  }
  // The bulk copy, then the columns it leaves, and -inf up to a multiple of kWarpColumns.
  __device__ void load_span(T* to, const T* from) {
    const int bytes = bulk_bytes(from);
    if (lane == 0 && bytes > 0) ptx::bulk_load(ptx::shared_address(to), from, bytes, loads);
    const int filled = (span_columns + kWarpColumns - 1) / kWarpColumns * kWarpColumns;
    if (bytes == filled * static_cast<int>(sizeof(T))) return;
#pragma unroll 4
    for (int c = bytes / static_cast<int>(sizeof(T)) + lane; c < span_columns; c += 32) {
      to[c] = from[c];
    }
    for (int c = span_columns + lane; c < filled; c += 32) to[c] = minus_infinity<T>();
  }

  __device__ void wait_for_row() { ptx::barrier_wait(loads, rows_done % 2); }

  __device__ void gradient_written() {
    ptx::fence_async_shared();
    __syncwarp();
    T* to = static_cast<T*>(p.gradient) + (row - p.first_row) * p.gradient_stride +
            int64_t{first_strip} * p.strip_columns;
    const int bytes = bulk_bytes(to);
    if (lane == 0 && bytes > 0) {
      ptx::bulk_store(to, ptx::shared_address(kept), bytes);
      ptx::bulk_commit();
    }
#pragma unroll 4
    for (int c = bytes / static_cast<int>(sizeof(T)) + lane; c < span_columns; c += 32) {
      to[c] = kept[c];
    }
  }

  // Starts the next row once no store reads from this one any more.
  __device__ void row_done() {
    ++rows_done;
    __syncwarp();
    if (lane == 0) ptx::bulk_wait_reads();
    __syncwarp();
    start_row(row + stride, label_ahead);
  }
};

#endif

template <class Kind>
__global__ void __launch_bounds__(512, 2) cluster_rows(const __grid_constant__ HeadParams p) {
#if ULLAGE_SM90
  // the block's strips | the teacher's | partials | load barriers [warps] | exchange barriers
  extern __shared__ __align__(128) std::byte cluster_shared[];
  using T = typename Kind::Element;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int n_warps = static_cast<int>(blockDim.x) / 32;
  const int rank = static_cast<int>(ptx::cluster_rank());
  const int n_blocks = (p.n_strips + p.strips_per_block - 1) / p.strips_per_block;
  const int block_first = rank * p.strips_per_block;
  const int block_last = min(block_first + p.strips_per_block, p.n_strips);
  const int first_strip = block_first + warp * p.strips_per_warp;
  const int last_strip = min(first_strip + p.strips_per_warp, block_last);
  const uint32_t barriers = ptx::shared_address(cluster_shared + p.row_bytes + p.partial_bytes);
  ClusterStrips<Kind> strips{
      .p = p,
      .kept = reinterpret_cast<T*>(cluster_shared) + (first_strip - block_first) * p.strip_columns,
      .partials = reinterpret_cast<float*>(cluster_shared + p.row_bytes),
      .loads = barriers + warp * 8,
      .exchanges = barriers + n_warps * 8,
      .first_strip = first_strip,
      .last_strip = last_strip,
      .span_columns = columns_between(p, first_strip, last_strip),
      .teacher_offset = p.strips_per_block * p.strip_columns,
      .warp = warp,
      .lane = lane,
      .n_working_warps = (p.n_strips + p.strips_per_warp - 1) / p.strips_per_warp,
      .n_blocks = n_blocks,
      .stride = ptx::n_clusters()};
  if (lane == 0) {
    ptx::barrier_init(strips.loads, 1);
    if (warp == 0) {
      for (int i = 0; i < kExchangeBarriers; ++i) ptx::barrier_init(strips.exchanges + i * 8, 1);
    }
    ptx::fence_barrier_init();
    ptx::fence_async_shared();
  }
  __syncwarp();
  ptx::cluster_sync();  // every block's barriers are ready before a peer counts on them
  if (first_strip >= last_strip) return;

  const int64_t first_row = p.first_row + ptx::cluster_id();
  if (first_row < end_row(p)) strips.start_row(first_row, stored_label(p, first_row));
  const bool writes = rank == 0 && warp == 0;
  for (int64_t row = first_row; row < end_row(p); row += strips.stride) {
    if (row != strips.row) {
      ptx::wait_for_previous_kernel();
      clear_row<T>(p, row, first_strip, last_strip, writes);
      continue;
    }
    strips.wait_for_row();
    process_row<Kind>(p, row, strips.inputs, strips, lane, writes);
    strips.row_done();
  }
  if (lane == 0) ptx::bulk_wait_reads();
#endif
}

struct ClusterRows {
  template <class Kind>
  static const void* of() {
    return reinterpret_cast<const void*>(&cluster_rows<Kind>);
  }
};

}  // namespace ullage::lossk::cuda
