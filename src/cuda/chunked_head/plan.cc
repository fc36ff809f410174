#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "contract/describe.h"
#include "contract/head_validate.h"
#include "cuda/chunked_head/chunked_products.h"
#include "cuda/head_logits/config.h"
#include "cuda/head_logits/fill_params.h"

#define ULLAGE_RETURN_IF_REFUSED(call) \
  if (Status status = (call); !status.ok()) return status

namespace ullage::lossk::cuda {

Status check_product_dtype(std::string_view field, DType dtype,
                           std::initializer_list<DType> accepted) {
  std::string names;
  for (const DType each : accepted) {
    if (dtype == each) return kHeadOk;
    if (names.find(name_of(each)) != std::string::npos) continue;
    names += (names.empty() ? "" : ", ") + std::string(name_of(each));
  }
  return {kHeadBadDtype, std::string(field) + " is " + std::string(name_of(dtype)) +
                             "; accepted by chunked products: " + names};
}

namespace {

constexpr int64_t kDefaultBudgetBytes = int64_t{512} << 20;

bool is_rounded(DType dtype) { return dtype != DType::kF32; }

// The types that cuBLASLt multiplies; the terms are checked by the rows' own plan.
Status check_products(const Shape& shape, const HeadConfig& config, const Request& request,
                      int teacher) {
  if (shape.d_model == 0) {
    return {kHeadShapeMismatch, "d_model is 0; accepted by chunked products: 1 or more"};
  }
  const int64_t rank = config.options.adapter_rank;
  if (shape.d_model > INT32_MAX || rank > shape.d_model) {
    return {kLossDimensionTooLarge, "d_model is " + describe(shape.d_model) + " and adapter_rank " +
                                        describe(rank) + "; accepted on a GPU: up to " +
                                        describe(INT32_MAX) + " and up to d_model"};
  }
  const DType input = request.input_dtype;
  ULLAGE_RETURN_IF_REFUSED(
      check_product_dtype("hidden", input, {DType::kBF16, DType::kF16, DType::kF32}));
  ULLAGE_RETURN_IF_REFUSED(check_product_dtype("weight", request.weight_dtype, {input}));
  if (request.d_hidden) {
    ULLAGE_RETURN_IF_REFUSED(
        check_product_dtype("d_hidden", request.grad_dtype, {input, DType::kF32}));
  }
  if (request.d_weight || request.d_bias || request.d_adapter) {
    ULLAGE_RETURN_IF_REFUSED(
        check_product_dtype("d_weight", request.d_weight_dtype, {input, DType::kF32}));
  }
  if (teacher < 0) return kHeadOk;
  const Teacher& given = config.teachers[static_cast<size_t>(teacher)];
  if (given.d_model > INT32_MAX) {
    return {kLossDimensionTooLarge, "the teacher's d_model is " + describe(given.d_model) +
                                        "; accepted on a GPU: up to " + describe(INT32_MAX)};
  }
  ULLAGE_RETURN_IF_REFUSED(input == DType::kF32
                               ? check_product_dtype("the teacher's hidden", given.dtype,
                                                     {DType::kBF16, DType::kF16, DType::kF32})
                               : check_product_dtype("the teacher's hidden", given.dtype, {input}));
  return check_product_dtype("the teacher's weight", given.weight_dtype, {given.dtype});
}

// The teacher that gives hidden states, or -1.
Result<int> hidden_teacher(const HeadConfig& config) {
  int first = -1;
  for (const LossTerm& term : config.terms) {
    if (term.kind != LossKind::kDistillation) continue;
    if (config.teachers[static_cast<size_t>(term.teacher)].kind != TeacherKind::kHidden) continue;
    if (first < 0) first = term.teacher;
    if (term.teacher != first) {
      return Status(kHeadUnknownKind,
                    "term '" + term.name + "': teacher is " + describe(term.teacher) +
                        "; accepted on a GPU: one that gives hidden states, " + describe(first));
    }
  }
  return first;
}

// The plan of the rows: logits in the input's type, the student's and the teacher's, the gradient
// in place of the former.
Result<CudaHeadPlan> plan_rows(const Shape& shape, const HeadConfig& config, const Request& request,
                               const CudaDevice& device) {
  HeadConfig rows = config;
  rows.options.bias = false;
  rows.options.adapter_rank = 0;
  for (Teacher& teacher : rows.teachers) {
    if (teacher.kind != TeacherKind::kHidden) continue;
    teacher.kind = TeacherKind::kLogits;
    teacher.dtype = request.input_dtype;
  }
  const Request wanted = {
      .input_dtype = request.input_dtype,
      .grad_dtype = request.input_dtype,
      .d_logits = request.d_hidden || request.d_weight || request.d_bias || request.d_adapter,
      .entropy = request.entropy,
      .policy_metrics = request.policy_metrics};
  return plan_cuda({shape.n_tok, 0, shape.vocab}, rows, wanted, {.device = device});
}

// --- Memory. -------------------------------------------------------------------------------------

// The gradients summed over rows: shapes, types, and where `sum` may be needed.
struct SumsOf {
  SummedGradient ChunkedParams::* gradient;
  bool wanted;
  int64_t rows, cols;
  bool by_product;  // else by a kernel, always in f32
};

std::array<SumsOf, 4> sums_of(const ChunkedLayout& l) {
  return {SumsOf{&ChunkedParams::d_weight, l.d_weight, l.vocab, l.d_model, true},
          SumsOf{&ChunkedParams::d_bias, l.d_bias, l.vocab, 1, false},
          SumsOf{&ChunkedParams::d_adapter_a, l.d_adapter, l.rank, l.d_model, true},
          SumsOf{&ChunkedParams::d_adapter_b, l.d_adapter, l.vocab, l.rank, true}};
}

// Whether the gradient is summed in the workspace and rounded at the end.
bool rounds(const ChunkedProducts& state, const SumsOf& each) {
  const bool by_product = each.by_product && is_rounded(state.layout.sum_dtype);
  return each.wanted && is_rounded(state.request.d_weight_dtype) && !by_product;
}
bool rounds_hidden(const ChunkedProducts& state) {
  return state.layout.d_hidden && state.layout.d_hidden_dtype != state.request.grad_dtype;
}

}  // namespace

void take_workspace(const ChunkedProducts& state, WorkspaceSlices& slices, std::byte*& rows,
                    ChunkedParams& p) {
  const ChunkedLayout& layout = state.layout;
  const int64_t element = size_of(layout.dtype), c = layout.chunk;
  // First, for it starts with the census.
  slices.take_booked(rows, state.rows.bookings(), state.rows.workspace_bytes());
  slices.take(p.logits, "logit chunk", c * layout.logits_stride * element);
  if (layout.gradients() && state.n_gradients > 1) {
    slices.take(p.gradient, "logit gradient chunk", c * layout.logits_stride * element);
  }
  if (layout.teacher_d_model > 0) {
    slices.take(p.teacher_logits, "teacher chunk", c * layout.logits_stride * element);
  }
  if (layout.copies_hidden()) {
    slices.take(p.hidden_rows, "hidden rows", c * layout.d_model * element);
  }
  if (layout.rank > 0) {
    slices.take(p.adapter_rows, "adapter rows", c * layout.rank_stride * element);
    if (has_product(layout, Product::kAdapterRowGradient)) {
      slices.take(p.adapter_row_gradient, "adapter rows", c * layout.rank_stride * element);
    }
  }
  if (rounds_hidden(state)) {
    slices.take(p.d_hidden_sum, "d_hidden chunk in f32", c * layout.d_model * 4);
  }
  for (const SumsOf& each : sums_of(layout)) {
    if (rounds(state, each)) {
      slices.take((p.*each.gradient).sum, "gradient sums in f32", each.rows * each.cols * 4);
    }
  }
}

namespace {

int64_t bytes_at(ChunkedProducts& state, int64_t chunk) {
  ChunkedLayout& layout = state.layout;
  layout.chunk = chunk;
  layout.n_chunks = chunk == 0 ? 0 : (layout.n_tok + chunk - 1) / chunk;
  // A sum over one chunk is rounded once by its product.
  layout.sum_dtype = layout.n_chunks > 1 ? DType::kF32 : state.request.d_weight_dtype;
  WorkspaceSlices slices(nullptr, nullptr);
  std::byte* rows = nullptr;
  ChunkedParams p;
  take_workspace(state, slices, rows, p);
  return slices.used();
}

// The largest multiple of kRowUnit that fits, or 0.
int64_t largest_chunk(ChunkedProducts& state, int64_t limit) {
  int64_t fits = 0, too_many = (state.shape.n_tok + kRowUnit - 1) / kRowUnit;
  while (fits + 1 < too_many) {
    const int64_t middle = fits + (too_many - fits) / 2;
    (bytes_at(state, middle * kRowUnit) <= limit ? fits : too_many) = middle;
  }
  return fits * kRowUnit;
}

// No more chunks than `largest` makes, as even as whole tiles of the products allow.
int64_t even_chunk(int64_t n_tok, int64_t largest) {
  for (const int64_t tile : {int64_t{1024}, int64_t{128}}) {
    if (largest >= tile) largest -= largest % tile;
  }
  const int64_t n_chunks = (n_tok + largest - 1) / largest;
  const int64_t tile = largest >= 128 ? 128 : kRowUnit;
  return std::min(largest, round_up((n_tok + n_chunks - 1) / n_chunks, tile));
}

Status choose_chunk(ChunkedProducts& state, const CudaLinearHeadOptions& options) {
  const int64_t n = state.shape.n_tok;
  const bool given = options.budget_bytes > 0;
  int64_t limit = given ? options.budget_bytes : kDefaultBudgetBytes;
  if (!given && state.layout.d_weight && is_rounded(state.request.d_weight_dtype)) {
    limit += state.shape.vocab * state.shape.d_model * 4;
  }
  int64_t chunk = n;
  if (options.chunk != 0) {
    if (options.chunk < 0 || (options.chunk % kRowUnit != 0 && options.chunk < n)) {
      return {kLossBadChunk, "chunk is " + describe(options.chunk) + "; accepted: a multiple of " +
                                 describe(kRowUnit) + " rows, or n_tok or more"};
    }
    chunk = std::min(options.chunk, n);
    if (!given) limit = std::numeric_limits<int64_t>::max();
  } else if (bytes_at(state, n) > limit) {
    const int64_t largest = largest_chunk(state, limit);
    chunk = largest == 0 ? std::min(n, kRowUnit) : even_chunk(n, largest);
  }
  if (const int64_t bytes = bytes_at(state, chunk); bytes > limit) {
    return {kLossBadChunk, "a chunk of " + describe(chunk) + " rows needs " + describe(bytes) +
                               " bytes of workspace; allowed: " + describe(limit)};
  }
  return kHeadOk;
}

// --- The promise. --------------------------------------------------------------------------------

bool two_passes(const ChunkedProducts& state) {
  return state.n_sequence_terms > 0 && state.layout.gradients() && state.layout.n_chunks > 1;
}

double operations_of(const ChunkedProducts& state) {
  double sum = 0;
  for (int i = 0; i < kProducts; ++i) {
    const auto product = static_cast<Product>(i);
    if (!has_product(state.layout, product)) continue;
    const auto shape = product_shape(state.layout, product, state.shape.n_tok, state.shape.vocab);
    const bool again = two_passes(state) && product <= Product::kTeacherLogits;
    sum += (again ? 4.0 : 2.0) * static_cast<double>(shape.m) * static_cast<double>(shape.n) *
           static_cast<double>(shape.k);
  }
  return sum;
}

int launches_of(const ChunkedProducts& state) {
  const ChunkedLayout& layout = state.layout;
  int make = layout.copies_hidden() + layout.bias;
  int add = layout.d_bias + rounds_hidden(state);
  for (int i = 0; i < kProducts; ++i) {
    const auto product = static_cast<Product>(i);
    (product <= Product::kTeacherLogits ? make : add) += n_parts(layout, product);
  }
  const auto chunks = static_cast<int>(layout.n_chunks);
  int launches = 2;  // census, scalars
  if (chunks == 0) return launches;
  // What the rows' own plan puts on the stream between census and scalars, of each chunk.
  const bool sequences = state.n_sequence_terms > 0;
  const int rows = state.rows.launches() - 2 - (sequences ? 2 : 0);
  launches += chunks * (make + rows + add);
  if (sequences) launches += 2;  // sums and slopes
  if (two_passes(state)) launches += chunks * make;
  for (const SumsOf& each : sums_of(layout)) launches += rounds(state, each);
  return launches;
}

}  // namespace

Result<LinearState> plan_chunked_products(const Shape& shape, const HeadConfig& config,
                                          const Request& request,
                                          const CudaLinearHeadOptions& options) {
  const Result<int> found = hidden_teacher(config);
  if (!found) return found.status();
  const int teacher = *found;
  ULLAGE_RETURN_IF_REFUSED(check_products(shape, config, request, teacher));
  Result<CudaHeadPlan> rows = plan_rows(shape, config, request, options.device);
  if (!rows) return rows.status();
  auto state = std::make_shared<ChunkedProducts>(*std::move(rows));
  state->kernel = kChunkedProducts;
  state->shape = shape;
  state->config = config;
  state->request = request;
  state->teacher = teacher;
  state->rejections = state->rows.rejections();
  for (const LossTerm& term : config.terms) state->n_sequence_terms += is_sequence(term) ? 1 : 0;
  state->n_gradients = n_gradients(passes_of(config));

  ChunkedLayout& layout = state->layout;
  layout.n_tok = shape.n_tok;
  layout.d_model = shape.d_model;
  layout.vocab = shape.vocab;
  layout.rank = config.options.adapter_rank;
  layout.dtype = request.input_dtype;
  if (teacher >= 0) {
    const Teacher& given = config.teachers[static_cast<size_t>(teacher)];
    layout.teacher_d_model = given.d_model;
    layout.teacher_dtype = given.dtype;
  }
  layout.logits_stride = round_up(shape.vocab, 128 / size_of(layout.dtype));
  layout.rank_stride = round_up(layout.rank, 16 / size_of(layout.dtype));
  layout.d_hidden = request.d_hidden;
  const bool one_product = layout.rank == 0 && n_parts(layout, Product::kHiddenGradient) <= 1;
  layout.d_hidden_dtype = one_product ? request.grad_dtype : DType::kF32;
  layout.bias = config.options.bias;
  layout.d_weight = request.d_weight;
  layout.d_bias = request.d_bias;
  layout.d_adapter = request.d_adapter;
  ULLAGE_RETURN_IF_REFUSED(choose_chunk(*state, options));

  state->chunk = layout.chunk;
  state->n_chunks = layout.n_chunks;
  state->mode = two_passes(*state) ? "chunk_two_pass" : "chunk";
  state->operations = operations_of(*state);
  WorkspaceSlices slices(nullptr, &state->bookings);
  std::byte* rows_workspace = nullptr;
  ChunkedParams p;
  take_workspace(*state, slices, rows_workspace, p);
  state->workspace_bytes = slices.used();
  state->launches = launches_of(*state);
  return LinearState(std::move(state));
}

}  // namespace ullage::lossk::cuda
