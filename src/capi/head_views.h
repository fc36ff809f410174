// The C structs of ullage/head.h as the C++ ones.
#pragma once

#include "ullage/head.h"
#include "ullage/lossk/head.h"
#include "ullage/status.h"

namespace ullage::capi {

// Errors: 695 for a struct_size that is not one of ours, for a stride or size that the C++ views
// cannot say; 696 for a storage type that the field does not take. `inputs.teachers` is resized, so
// that it allocates once.
Status read_inputs(const ullage_head_inputs& from, lossk::Inputs& inputs);
Status read_outputs(const ullage_head_outputs& from, lossk::Outputs& outputs);

// Adjacent floating-point values.
Status read_values(const ullage_vector& from, MutableVectorView& values);

}  // namespace ullage::capi
