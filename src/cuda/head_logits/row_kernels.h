// The row kernels by kernel, storage type, family and softcap, as what cudaLaunchKernelExC takes.
// Each function is one file of inst/.
#pragma once

#include "cuda/head_logits/params.h"

namespace ullage::lossk::cuda {

const void* cluster_rows_f32(Family family, bool softcap);
const void* cluster_rows_bf16(Family family, bool softcap);
const void* cluster_rows_f16(Family family, bool softcap);
const void* streamed_rows_f32(Family family, bool softcap);
const void* streamed_rows_bf16(Family family, bool softcap);
const void* streamed_rows_f16(Family family, bool softcap);
const void* short_rows_f32(Family family, bool softcap);
const void* short_rows_bf16(Family family, bool softcap);
const void* short_rows_f16(Family family, bool softcap);
const void* held_rows_f32(Family family, bool softcap);
const void* held_rows_bf16(Family family, bool softcap);
const void* held_rows_f16(Family family, bool softcap);

// `Kernel::of<RowKind<T, family, softcap>>()` for what is known at run time.
template <class Kernel, class T>
const void* kernel_of(Family family, bool softcap) {
  const auto of_family = [&]<Family kFamily>() {
    return softcap ? Kernel::template of<RowKind<T, kFamily, true>>()
                   : Kernel::template of<RowKind<T, kFamily, false>>();
  };
  switch (family) {
    case Family::kLabels:
      return of_family.template operator()<Family::kLabels>();
    case Family::kForward:
      return of_family.template operator()<Family::kForward>();
    case Family::kReverse:
      return of_family.template operator()<Family::kReverse>();
    case Family::kMixed:
      return of_family.template operator()<Family::kMixed>();
    case Family::kJensenShannon:
      return of_family.template operator()<Family::kJensenShannon>();
    case Family::kEntropy:
      return of_family.template operator()<Family::kEntropy>();
    case Family::kTempered:
      return of_family.template operator()<Family::kTempered>();
  }
  return nullptr;
}

}  // namespace ullage::lossk::cuda
