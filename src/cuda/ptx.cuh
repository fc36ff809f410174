// The PTX this library writes itself, one function an instruction. Shared addresses are those of
// the shared window, as `shared_address` gives them. What only Hopper has sits behind
// ULLAGE_SM90, so that every file also compiles for sm_80; the host's pass sees it all.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define ULLAGE_SM90 1
#else
#define ULLAGE_SM90 0
#endif

namespace ullage::cuda::ptx {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
// The same, to be kept in a register: in a cluster an address takes a special register's latency
// to form, which the compiler is fond of paying again.
__device__ inline uint32_t kept_shared_address(const void* pointer) {
  uint32_t address = shared_address(pointer);
  asm volatile("" : "+r"(address));
  return address;
}

// This warp's place in its block, by a warp. From the shuffle the compiler sees that lanes have the
// same, and so keeps what follows from it in uniform registers, and branches on it without a place
// for lanes to meet again.
__device__ inline int warp_of_block() {
  return __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);
}

// 2^x; relative error at most 2^-22, subnormal results are 0; 2^0 is 1 exactly.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2 x; absolute error at most 2^-22 for x in [0.5, 2], relative 2^-22 elsewhere; log2 1 is 0.
__device__ inline float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger of two; NaN where either is.
__device__ inline float max_nan(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// One 16-byte store. Written out, for the compiler is free to take a uint4 apart, and did. Loads
// may move over it: nothing that it writes is read again.
__device__ inline void store_words(void* global, uint4 words) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w));
}
// Where `stores`, without a branch: lanes that part meet again at a cost.
__device__ inline void store_words_if(bool stores, void* global, uint4 words) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::
          "l"(global),
      "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w), "r"(static_cast<int>(stores)));
}

__device__ inline void prefetch_to_l1(const void* global) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(global));
}
__device__ inline void prefetch_to_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// 16 bytes from global to shared memory, both so aligned, on their way until the thread waits for
// all that it has copied.
__device__ inline void copy_async(void* shared, const void* global) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

#if ULLAGE_SM90

__device__ inline uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline uint32_t cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
__device__ inline uint32_t cluster_id() {
  uint32_t id;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(id));
  return id;
}
__device__ inline uint32_t n_clusters() {
  uint32_t n;
  asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(n));
  return n;
}

// All threads of the cluster meet; what was written before, in any of its blocks' shared memory, is
// seen after.
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// The address, in the cluster's window, of what lies at `address` in block `rank`. The blocks'
// shared memories lie at a fixed distance each.
__device__ inline uint32_t address_in_block(uint32_t address, uint32_t rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
// Stores to another block's shared memory and counts the 4 bytes on that block's barrier when they
// have arrived. Costs no fence, unlike a cluster barrier, whose release waits for every store the
// thread has under way.
__device__ inline void store_in_block(uint32_t remote, float value, uint32_t remote_barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
          remote),
      "r"(__float_as_uint(value)), "r"(remote_barrier)
      : "memory");
}

// The same with 8 bytes, to a multiple of 8.
__device__ inline void store_pair_in_block(uint32_t remote, int first, int second,
                                           uint32_t remote_barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::
          "r"(remote),
      "r"(first), "r"(second), "r"(remote_barrier)
      : "memory");
}

__device__ inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine.
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Bulk copies: addresses and bytes are multiples of 16. The loads ask L2 to let their lines go
// last: a copy of rows takes 0.97 of the time it takes without (H200; bench/NOTES.md), and what
// other kernels read afterwards is found in L2 as before.
__device__ inline void bulk_load(uint32_t shared, const void* global, uint32_t bytes,
                                 uint32_t barrier) {
  asm volatile(
      "{\n.reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_last.b64 policy, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], policy;\n}" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until the copy engine has read what this thread's committed stores read, the newest kPending of
// them excepted.
template <int kPending = 0>
__device__ inline void bulk_wait_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Counts in global memory for other blocks: whoever sees the count may take what this thread has
// read before for read.
__device__ inline void count_release(int* counter, int n) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(n) : "memory");
}
__device__ inline void await_count(const int* counter, int count) {
  int seen;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (seen < count);
}
// Orders this thread's ordinary accesses before later ones of the copy engine.
__device__ inline void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
// The same of shared memory alone.
__device__ inline void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Waits until the kernel before this one in the stream has finished, where this one was launched to
// start early; otherwise returns at once.
__device__ inline void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ inline void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

#else

__device__ inline void wait_for_previous_kernel() {}
__device__ inline void let_next_kernel_start() {}

#endif

}  // namespace ullage::cuda::ptx
