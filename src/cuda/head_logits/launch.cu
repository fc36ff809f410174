#include <algorithm>

#include "cuda/cuda_status.h"
#include "cuda/head_logits/launch.h"
#include "cuda/head_logits/row_kernels.h"
#include "cuda/head_logits/scalars.cuh"
#include "cuda/head_logits/top_k_kernels.cuh"

namespace ullage::lossk::cuda {
namespace {

const void* row_kernel(const RowLaunch& launch, bool softcap) {
  const auto of = [&](auto cluster, auto streamed, auto short_rows, auto held) {
    switch (launch.layout.kernel) {
      case RowKernel::kCluster:
        return cluster(launch.family, softcap);
      case RowKernel::kStreamed:
        return streamed(launch.family, softcap);
      default:
        return (launch.layout.held ? held : short_rows)(launch.family, softcap);
    }
  };
  switch (launch.dtype) {
    case DType::kBF16:
      return of(cluster_rows_bf16, streamed_rows_bf16, short_rows_bf16, held_rows_bf16);
    case DType::kF16:
      return of(cluster_rows_f16, streamed_rows_f16, short_rows_f16, held_rows_f16);
    default:
      return of(cluster_rows_f32, streamed_rows_f32, short_rows_f32, held_rows_f32);
  }
}

// One launch. `cluster`: blocks, 0 for a kernel that knows of none. `early`: may start while the
// kernel before it runs, and waits itself where it must.
Status start(const char* what, const void* kernel, const HeadParams& params, unsigned grid,
             unsigned threads, int64_t shared_bytes, int cluster, bool early, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  if (cluster > 0) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    ++config.numAttrs;
  }
  if (early) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
    ++config.numAttrs;
  }
  void* arguments[] = {const_cast<HeadParams*>(&params)};
  ULLAGE_RETURN_IF_CUDA_FAILS(what, cudaLaunchKernelExC(&config, kernel, arguments));
  return kCudaOk;
}

const void* gather_kernel(DType dtype) {
  if (dtype == DType::kBF16) return reinterpret_cast<const void*>(&gather_top_k<__nv_bfloat16>);
  if (dtype == DType::kF16) return reinterpret_cast<const void*>(&gather_top_k<__half>);
  return reinterpret_cast<const void*>(&gather_top_k<float>);
}
const void* patch_kernel(DType dtype) {
  if (dtype == DType::kBF16) return reinterpret_cast<const void*>(&patch_top_k<__nv_bfloat16>);
  if (dtype == DType::kF16) return reinterpret_cast<const void*>(&patch_top_k<__half>);
  return reinterpret_cast<const void*>(&patch_top_k<float>);
}

unsigned blocks_of(int64_t items, int64_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

// Of 4096 rows or more: four for each thread of a block.
int parts_of(int64_t n_tok) {
  return static_cast<int>(std::clamp<int64_t>(n_tok / (4 * kScalarThreads), 1, kMostParts));
}

int threads_of(const RowLayout& layout) {
  if (layout.kernel != RowKernel::kCluster) return layout.warps * 32;
  return (layout.warps * layout.groups + kOtherWarps) * 32;
}

// Clusters that fit the device together; each takes the next row when it comes to it.
Status count_resident_clusters(const RowLayout& layout, const void* kernel, int& clusters) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(layout.cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(layout.cluster);
  config.blockDim = static_cast<unsigned>(threads_of(layout));
  config.dynamicSmemBytes = static_cast<size_t>(layout.shared_bytes);
  config.attrs = &attribute;
  config.numAttrs = 1;
  ULLAGE_RETURN_IF_CUDA_FAILS("cudaOccupancyMaxActiveClusters",
                              cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
  if (clusters < 1) {
    return {kCudaUnsupportedDevice, "the device fits no cluster of " + describe(layout.cluster) +
                                        " blocks with " + describe(layout.shared_bytes) +
                                        " bytes of shared memory each"};
  }
  return kCudaOk;
}

// `early`: the kernel before this one writes neither logits nor teacher.
Status start_plain_rows(const HeadParams& params, const RowLaunch& launch, bool early,
                        cudaStream_t stream) {
  const RowLayout& layout = launch.layout;
  const void* kernel = row_kernel(launch, params.softcap > 0);
  const auto threads = static_cast<unsigned>(threads_of(layout));
  HeadParams rows = params;
  const int resident = layout.kernel != RowKernel::kShort ? kResidentWarps / layout.warps
                       : layout.held                      ? kHeldBlocks
                                                          : kShortBlocks;
  int64_t groups = int64_t{launch.n_multiprocessors} * resident;
  ULLAGE_RETURN_IF_CUDA_FAILS(
      "cudaFuncSetAttribute",
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(layout.shared_bytes)));
  if (layout.kernel == RowKernel::kCluster) {
    ULLAGE_RETURN_IF_CUDA_FAILS(
        "cudaFuncSetAttribute",
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    int clusters = 0;
    ULLAGE_RETURN_IF_REFUSED(count_resident_clusters(layout, kernel, clusters));
    groups = clusters;
    // Few enough that all are done at nearly the same time.
    if (layout.cluster == 1) {
      rows.rows_at_a_time =
          static_cast<int>(std::clamp<int64_t>(params.n_rows / (64 * groups), 1, 8));
    }
  }
  if (layout.kernel == RowKernel::kShort) {
    groups = std::min(groups, (params.n_rows - 1) / (layout.warps * layout.rows_at_a_time) + 1);
  }
  if (groups > params.n_rows) groups = params.n_rows;
  return start(name_of(layout.kernel).data(), kernel, rows,
               static_cast<unsigned>(groups * layout.cluster), threads, layout.shared_bytes,
               layout.kernel == RowKernel::kCluster ? layout.cluster : 0, early, stream);
}

// With what a top-k teacher needs before and after.
Status start_rows(const HeadParams& params, const RowLaunch& launch, bool early,
                  cudaStream_t stream) {
  if (params.n_rows == 0) return kCudaOk;
  if (params.top_k == 0) return start_plain_rows(params, launch, early, stream);
  const int64_t bitmap_bytes = top_k_bitmap_bytes(params.vocab);
  const void* const gather = gather_kernel(launch.dtype);
  ULLAGE_RETURN_IF_CUDA_FAILS(
      "cudaFuncSetAttribute",
      cudaFuncSetAttribute(gather, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(bitmap_bytes)));
  ULLAGE_RETURN_IF_REFUSED(start("head_gather_top_k", gather, params,
                                 static_cast<unsigned>(params.n_rows), kGatherThreads, bitmap_bytes,
                                 0, false, stream));
  ULLAGE_RETURN_IF_REFUSED(start_plain_rows(params, launch, early, stream));
  if (params.gradient == nullptr) return kCudaOk;
  return start("head_patch_top_k", patch_kernel(launch.dtype), params,
               blocks_of(params.n_rows, kPatchWarps), 32 * kPatchWarps, 0, 0, false, stream);
}

}  // namespace

Status launch_census(const HeadParams& params, CUstream_st* stream) {
  HeadParams counted = params;
  counted.parts = parts_of(params.n_tok);
  cudaFuncAttributes code;
  ULLAGE_RETURN_IF_CUDA_FAILS("cudaFuncGetAttributes", cudaFuncGetAttributes(&code, &census));
  // Blocks of a cluster can wait for each other (blocks_sync); elsewhere one takes all parts.
  const int blocks = code.ptxVersion >= 90 ? counted.parts : 1;
  return start("head_census", reinterpret_cast<const void*>(&census), counted,
               static_cast<unsigned>(blocks), kScalarThreads, 0, blocks > 1 ? blocks : 0, false,
               stream);
}

Status launch_sequences(const HeadParams& params, CUstream_st* stream) {
  if (params.n_segments > 0) {
    ULLAGE_RETURN_IF_REFUSED(
        start("head_sum_sequences", reinterpret_cast<const void*>(&sum_sequences), params,
              static_cast<unsigned>(params.n_segments), kScalarThreads, 0, 0, false, stream));
  }
  return start("head_slope_sequences", reinterpret_cast<const void*>(&slope_sequences), params,
               blocks_of(params.n_tok, 256), 256, 0, 0, false, stream);
}

Status launch_scalars(const HeadParams& params, CUstream_st* stream) {
  HeadParams summed = params;
  summed.parts = parts_of(params.n_tok);
  const unsigned loss_blocks =
      params.token_loss.data == nullptr ? 0 : blocks_of(params.n_tok, kScalarThreads);
  return start("head_scalars", reinterpret_cast<const void*>(&scalars), summed,
               static_cast<unsigned>(params.n_terms * summed.parts) + loss_blocks, kScalarThreads,
               0, 0, true, stream);
}

Status launch_rows(const HeadParams& params, const RowLaunch& launch, CUstream_st* stream) {
  return start_rows(params, launch, false, stream);
}

Status launch_head(const HeadParams& params, std::span<const RowPass> passes, CUstream_st* stream) {
  ULLAGE_RETURN_IF_REFUSED(launch_census(params, stream));
  // A kernel that starts early, beside the one before it, is that after the census or the
  // sequences.
  bool early = true;
  const auto start_pass = [&](const RowPass& pass, bool gradient, bool adds, bool slopes_ready) {
    HeadParams rows = pass.params;
    if (!gradient) rows.gradient = nullptr;
    rows.accumulate |= adds;
    rows.slopes_ready = slopes_ready;
    Status status = start_rows(rows, pass.launch, early, stream);
    early = false;
    return status;
  };
  const bool sequences = params.n_sequence_terms > 0 && params.n_tok > 0;
  if (sequences) {
    // A sequence's slope needs all its rows: the rows once forward, then once more with the slopes.
    for (const RowPass& pass : passes) {
      if (!pass.sequences && params.gradient != nullptr) continue;
      ULLAGE_RETURN_IF_REFUSED(start_pass(pass, false, false, false));
    }
    ULLAGE_RETURN_IF_REFUSED(launch_sequences(params, stream));
    if (params.gradient == nullptr) return launch_scalars(params, stream);
    early = true;
  }
  bool adds = false;
  for (const RowPass& pass : passes) {
    const bool gradient = pass.gradient && params.gradient != nullptr;
    ULLAGE_RETURN_IF_REFUSED(start_pass(pass, gradient, adds, sequences));
    adds |= gradient;
  }
  return launch_scalars(params, stream);
}

Status read_census(const Census* device, Census& host, CUstream_st* stream) {
  ULLAGE_RETURN_IF_CUDA_FAILS(
      "reading the status word",
      cudaMemcpyAsync(&host, device, sizeof host, cudaMemcpyDeviceToHost, stream));
  ULLAGE_RETURN_IF_CUDA_FAILS("waiting for the stream", cudaStreamSynchronize(stream));
  return kCudaOk;
}

}  // namespace ullage::lossk::cuda
