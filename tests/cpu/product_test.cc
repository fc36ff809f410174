#include "cpu/product.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpu/dequant.h"
#include "cpu/instruction_set.h"
#include "cpu/product_plan.h"

namespace ullage::cpu {
namespace {

// A matrix of any element type, in either layout, and its exact values.
struct Matrix {
  ElementType type;
  int64_t rows, cols;
  std::vector<double> values;  // [rows][cols], as widened
  std::vector<std::byte> bytes;
  ProductOperand operand;  // of bytes

  double at(int64_t row, int64_t col) const {
    return values[static_cast<size_t>(row * cols + col)];
  }
};

enum class Layout { kRowsAdjacent, kColumnsAdjacent };  // which index has stride 1

template <class T, class Value>
void put(std::byte* base, int64_t index, Value value) {
  const T element = [&] {
    if constexpr (std::is_arithmetic_v<T>)
      return static_cast<T>(value);
    else
      return T::from_float(static_cast<float>(value));
  }();
  std::memcpy(base + index * static_cast<int64_t>(sizeof(T)), &element, sizeof(T));
}

double get(const Matrix& matrix, int64_t index) {
  if (matrix.type == ElementType::kF64) {
    double value;
    std::memcpy(&value, matrix.bytes.data() + index * 8, 8);
    return value;
  }
  float value;
  decode_row(matrix.type, matrix.bytes.data(), index, 1, &value);
  return value;
}

// `draw` gives the values before they are rounded to `type`; a quantised matrix draws its blocks.
template <class Draw>
Matrix make_matrix(ElementType type, int64_t rows, int64_t cols, Layout layout, int64_t padding,
                   std::mt19937& random, Draw draw) {
  Matrix matrix{type, rows, cols, {}, {}, {}};
  const int64_t inner = layout == Layout::kRowsAdjacent ? rows : cols;
  const int64_t outer = layout == Layout::kRowsAdjacent ? cols : rows;
  const int64_t stride = is_quantised(type) ? inner : inner + padding;
  matrix.bytes.resize(static_cast<size_t>(bytes_of(type, stride * outer)));
  matrix.operand = {matrix.bytes.data(), type, layout == Layout::kRowsAdjacent ? 1 : stride,
                    layout == Layout::kRowsAdjacent ? stride : 1};
  if (is_quantised(type)) {
    for (std::byte& byte : matrix.bytes) byte = static_cast<std::byte>(random() & 255);
    const int64_t block = bytes_of(type, kQuantBlock);
    for (size_t at = 0; at < matrix.bytes.size(); at += static_cast<size_t>(block)) {
      // Finite scales, and small: exponents 8 to 15 of 31.
      for (size_t field = 0; field < (type == ElementType::kQ4_1 ? 2u : 1u); ++field) {
        const uint16_t bits = static_cast<uint16_t>((random() & 0x9fffu) | 0x2000u);
        std::memcpy(matrix.bytes.data() + at + 2 * field, &bits, 2);
      }
    }
  } else {
    for (int64_t i = 0; i < stride * outer; ++i) {
      // Padding is NaN: reading it would show.
      const double value = i % stride < inner ? draw() : NAN;
      switch (type) {
        case ElementType::kF64:
          put<double>(matrix.bytes.data(), i, value);
          break;
        case ElementType::kF32:
          put<float>(matrix.bytes.data(), i, value);
          break;
        case ElementType::kBF16:
          put<BF16>(matrix.bytes.data(), i, value);
          break;
        default:
          put<F16>(matrix.bytes.data(), i, value);
          break;
      }
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      matrix.values.push_back(
          get(matrix, row * matrix.operand.row_stride + col * matrix.operand.col_stride));
    }
  }
  return matrix;
}

Matrix make_matrix(ElementType type, int64_t rows, int64_t cols, Layout layout, int64_t padding,
                   std::mt19937& random) {
  std::normal_distribution<double> normal;
  return make_matrix(type, rows, cols, layout, padding, random, [&] { return normal(random); });
}

// The order that the header promises, element by element.
template <class T>
T reference(const Matrix& a, const Matrix& b, int64_t row, int64_t col, T old, bool accumulate,
            SumOrder order) {
  const int64_t block = order == SumOrder::kBlocks ? kProductKBlock : std::max<int64_t>(a.cols, 1);
  T c = accumulate ? old : T(0);
  for (int64_t k0 = 0; k0 < a.cols; k0 += block) {
    T sum = order == SumOrder::kBlocks ? T(0) : c;
    for (int64_t k = k0; k < std::min(a.cols, k0 + block); ++k) {
      sum = std::fma(static_cast<T>(a.at(row, k)), static_cast<T>(b.at(k, col)), sum);
    }
    const bool stored = order == SumOrder::kChain || (k0 == 0 && !accumulate);
    c = stored ? sum : c + sum;
  }
  return c;
}

// Runs the product with exactly the workspace it asks for, between guards.
template <class T>
void run(const ProductShape& shape, const ProductOperand& a, const ProductOperand& b, T* c,
         int64_t c_row_stride, bool accumulate, SumOrder order, WorkerPool& pool,
         int64_t packed_bytes = kMostPackedBytes) {
  const DType type = std::is_same_v<T, double> ? DType::kF64 : DType::kF32;
  const int64_t bytes = product_workspace_bytes(shape, type, pool.n_threads(), packed_bytes);
  const std::unique_ptr<std::byte[], void (*)(std::byte*)> memory(
      static_cast<std::byte*>(std::aligned_alloc(64, static_cast<size_t>((bytes + 127) / 64 * 64))),
      [](std::byte* pointer) { std::free(pointer); });
  std::memset(memory.get() + bytes, 0x5a, 64);
  // NaN in the workspace: what was not packed must not count.
  std::memset(memory.get(), 0xff, static_cast<size_t>(bytes));
  product(shape, a, b, c, c_row_stride, accumulate, order,
          {memory.get(), static_cast<size_t>(bytes)}, pool);
  for (int64_t i = 0; i < 64; ++i)
    ASSERT_EQ(memory[static_cast<size_t>(bytes + i)], std::byte{0x5a});
}

template <class T>
std::vector<T> random_vector(int64_t size, std::mt19937& random) {
  std::normal_distribution<double> normal;
  std::vector<T> values(static_cast<size_t>(size));
  for (T& value : values) value = static_cast<T>(normal(random));
  return values;
}

template <class T>
bool same_bits(const std::vector<T>& x, const std::vector<T>& y) {
  return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(T)) == 0;
}

// Compares every element, and what lies between the rows of C, with the reference.
template <class T>
void expect_reference(const Matrix& a, const Matrix& b, bool accumulate, SumOrder order,
                      WorkerPool& pool, std::mt19937& random) {
  const ProductShape shape{a.rows, b.cols, a.cols};
  const int64_t stride = shape.n + 3;
  const std::vector<T> old = random_vector<T>(shape.m * stride, random);
  std::vector<T> expected = old, c = old;
  for (int64_t row = 0; row < shape.m; ++row) {
    for (int64_t col = 0; col < shape.n; ++col) {
      T& value = expected[static_cast<size_t>(row * stride + col)];
      value = reference<T>(a, b, row, col, value, accumulate, order);
    }
  }
  run(shape, a.operand, b.operand, c.data(), stride, accumulate, order, pool);
  ASSERT_TRUE(same_bits(expected, c))
      << shape.m << "x" << shape.n << "x" << shape.k << " types " << static_cast<int>(a.type) << ","
      << static_cast<int>(b.type) << " strides " << a.operand.row_stride << ","
      << a.operand.col_stride << " " << b.operand.row_stride << "," << b.operand.col_stride
      << " accumulate " << accumulate << " chain " << (order == SumOrder::kChain) << " on "
      << instruction_set();
}

class ProductTest : public testing::TestWithParam<std::string_view> {
 protected:
  void SetUp() override { ASSERT_TRUE(force_instruction_set(GetParam())); }
  void TearDown() override { force_instruction_set(""); }
};

INSTANTIATE_TEST_SUITE_P(Sets, ProductTest, testing::ValuesIn(instruction_sets()),
                         [](const auto& set) { return std::string(set.param); });

TEST(InstructionSet, IsForcedByNameAndRefusedWhereUnknown) {
  for (std::string_view name : instruction_sets()) {
    EXPECT_TRUE(force_instruction_set(name));
    EXPECT_EQ(instruction_set(), name);
  }
  EXPECT_FALSE(force_instruction_set("AVX9"));
  EXPECT_TRUE(force_instruction_set(""));
  EXPECT_EQ(instruction_set(), instruction_sets().front());
}

// Every layout, element type, order and edge size, drawn from a fixed sequence.
TEST_P(ProductTest, EqualsTheReferenceBitForBit) {
  std::mt19937 random(7);
  const std::vector<int64_t> lanes{1,  2,  3,  4,  5,  7,  8,  9,  11, 12,
                                   13, 15, 16, 17, 31, 47, 48, 49, 65, 100};
  const std::vector<int64_t> depths{1, 2, 15, 16, 17, 31, 32, 33, 64, 255, 256, 257, 290, 512, 600};
  const auto pick = [&](const auto& from) { return from[random() % from.size()]; };
  std::vector<std::unique_ptr<WorkerPool>> pools;
  for (int n_threads : {1, 2, 3}) pools.push_back(std::make_unique<WorkerPool>(n_threads));
  for (int i = 0; i < 400; ++i) {
    const bool is_f64 = i % 4 == 3;
    const auto a_type = is_f64 ? ElementType::kF64 : static_cast<ElementType>(1 + random() % 3);
    const auto b_type = is_f64 ? ElementType::kF64 : static_cast<ElementType>(1 + random() % 6);
    const auto a_layout = static_cast<Layout>(random() % 2);
    auto b_layout = static_cast<Layout>(random() % 2);
    int64_t k = pick(depths);
    if (is_quantised(b_type)) {
      k = (k + kQuantBlock - 1) / kQuantBlock * kQuantBlock;
      b_layout = Layout::kRowsAdjacent;
    }
    const Matrix a = make_matrix(a_type, pick(lanes), k, a_layout, random() % 3, random);
    const Matrix b = make_matrix(b_type, k, pick(lanes), b_layout, random() % 3, random);
    const auto order = static_cast<SumOrder>(random() % 2);
    const bool accumulate = random() % 2 == 0;
    WorkerPool& pool = *pools[random() % pools.size()];
    is_f64 ? expect_reference<double>(a, b, accumulate, order, pool, random)
           : expect_reference<float>(a, b, accumulate, order, pool, random);
    if (HasFatalFailure()) return;
  }
}

// A row computed with its neighbours, alone, or by any number of threads: one set of bits.
TEST_P(ProductTest, RowsAndThreadsDoNotChangeABit) {
  std::mt19937 random(8);
  const int64_t m = 37, n = 131, k = 520;
  const Matrix a = make_matrix(ElementType::kF32, m, k, Layout::kColumnsAdjacent, 0, random);
  for (Layout layout : {Layout::kRowsAdjacent, Layout::kColumnsAdjacent}) {
    const Matrix b = make_matrix(ElementType::kBF16, k, n, layout, 0, random);
    WorkerPool one(1);
    std::vector<float> whole(static_cast<size_t>(m * n));
    run({m, n, k}, a.operand, b.operand, whole.data(), n, false, SumOrder::kBlocks, one);
    for (int n_threads = 1; n_threads <= 8; ++n_threads) {
      WorkerPool pool(n_threads);
      for (int64_t rows : {1, 2, 5, 8, 9, 36, 37}) {
        std::vector<float> parts(whole.size(), NAN);
        for (int64_t row = 0; row < m; row += rows) {
          ProductOperand part = a.operand;
          part.data = static_cast<const float*>(part.data) + row * part.row_stride;
          run({std::min(rows, m - row), n, k}, part, b.operand, parts.data() + row * n, n, false,
              SumOrder::kBlocks, pool);
        }
        ASSERT_TRUE(same_bits(whole, parts)) << n_threads << " threads, " << rows << " rows";
      }
    }
  }
}

// d_weight = G^T X over tokens, in chunks of every size.
TEST_P(ProductTest, AChainDoesNotSeeItsCuts) {
  std::mt19937 random(9);
  const int64_t vocab = 67, d_model = 50, n_tok = 70;
  const Matrix g = make_matrix(ElementType::kF32, vocab, n_tok, Layout::kRowsAdjacent, 2, random);
  const Matrix x =
      make_matrix(ElementType::kF16, n_tok, d_model, Layout::kColumnsAdjacent, 1, random);
  WorkerPool pool(2);
  std::vector<float> whole(static_cast<size_t>(vocab * d_model));
  run({vocab, d_model, n_tok}, g.operand, x.operand, whole.data(), d_model, false, SumOrder::kChain,
      pool);
  for (int64_t chunk = 1; chunk <= n_tok; ++chunk) {
    std::vector<float> parts(whole.size(), NAN);
    for (int64_t token = 0; token < n_tok; token += chunk) {
      ProductOperand g_part = g.operand, x_part = x.operand;
      g_part.data = static_cast<const float*>(g_part.data) + token * g_part.col_stride;
      x_part.data = static_cast<const F16*>(x_part.data) + token * x_part.row_stride;
      run({vocab, d_model, std::min(chunk, n_tok - token)}, g_part, x_part, parts.data(), d_model,
          token != 0, SumOrder::kChain, pool);
    }
    ASSERT_TRUE(same_bits(whole, parts)) << "chunk " << chunk;
  }
}

// Integers small enough that every sum is exact in any order: the oracle is integer arithmetic.
TEST_P(ProductTest, SmallIntegersAreExact) {
  std::mt19937 random(10);
  const auto draw = [&] { return static_cast<double>(random() % 7) - 3; };
  WorkerPool pool(2);
  for (ElementType type : {ElementType::kF32, ElementType::kBF16, ElementType::kF16}) {
    const Matrix a = make_matrix(type, 25, 700, Layout::kColumnsAdjacent, 0, random, draw);
    const Matrix b = make_matrix(type, 700, 77, Layout::kRowsAdjacent, 0, random, draw);
    std::vector<float> c(25 * 77);
    run({25, 77, 700}, a.operand, b.operand, c.data(), 77, false, SumOrder::kBlocks, pool);
    for (int64_t row = 0; row < 25; ++row) {
      for (int64_t col = 0; col < 77; ++col) {
        int64_t sum = 0;
        for (int64_t k = 0; k < 700; ++k) {
          sum += static_cast<int64_t>(a.at(row, k)) * static_cast<int64_t>(b.at(k, col));
        }
        ASSERT_EQ(c[static_cast<size_t>(row * 77 + col)], static_cast<float>(sum));
      }
    }
  }
}

// Shapes whose stationary operand is packed in several pieces: lanes, blocks of k, and both
// operands.
TEST_P(ProductTest, PiecesOfTheStationaryOperandMeet) {
  if (GetParam() == "SCALAR") GTEST_SKIP() << "minutes long; the cuts do not depend on the set";
  std::mt19937 random(11);
  WorkerPool pool(2);
  for (const ProductShape& shape :
       {ProductShape{4100, 4200, 5}, ProductShape{4200, 4100, 5}, ProductShape{256, 260, 4200},
        ProductShape{260, 256, 4200}, ProductShape{3, 40, 70000}}) {
    const Matrix a =
        make_matrix(ElementType::kF32, shape.m, shape.k, Layout::kColumnsAdjacent, 0, random);
    const Matrix b =
        make_matrix(ElementType::kF32, shape.k, shape.n, Layout::kRowsAdjacent, 0, random);
    for (SumOrder order : {SumOrder::kBlocks, SumOrder::kChain}) {
      std::vector<float> c(static_cast<size_t>(shape.m * shape.n));
      run(shape, a.operand, b.operand, c.data(), shape.n, false, order, pool);
      for (int i = 0; i < 500; ++i) {
        const int64_t row = static_cast<int64_t>(random()) % shape.m;
        const int64_t col = static_cast<int64_t>(random()) % shape.n;
        ASSERT_EQ(c[static_cast<size_t>(row * shape.n + col)],
                  reference<float>(a, b, row, col, 0, false, order));
      }
    }
  }
}

TEST_P(ProductTest, NaNAndInfinityStayInTheirRowAndColumn) {
  std::mt19937 random(12);
  WorkerPool pool(2);
  for (int64_t m : {3, 21}) {
    const auto zero = [] { return 0.0; };
    Matrix a = make_matrix(ElementType::kF32, m, 40, Layout::kColumnsAdjacent, 0, random, zero);
    Matrix b = make_matrix(ElementType::kF32, 40, 21, Layout::kRowsAdjacent, 0, random, zero);
    put<float>(a.bytes.data(), 2 * 40 + 33, NAN);
    put<float>(b.bytes.data(), 20 * 40 + 5, INFINITY);  // 0 * inf = NaN in column 20
    std::vector<float> c(static_cast<size_t>(m * 21));
    run({m, 21, 40}, a.operand, b.operand, c.data(), 21, false, SumOrder::kBlocks, pool);
    for (int64_t row = 0; row < m; ++row) {
      for (int64_t col = 0; col < 21; ++col) {
        EXPECT_EQ(std::isnan(c[static_cast<size_t>(row * 21 + col)]), row == 2 || col == 20);
      }
    }
  }
}

TEST_P(ProductTest, EmptyDimensions) {
  WorkerPool pool(2);
  const float x = 2;
  const ProductOperand operand{&x, ElementType::kF32, 1, 1};
  std::vector<float> c(6, 5);
  run({0, 3, 1}, operand, operand, c.data(), 3, false, SumOrder::kBlocks, pool);
  run({2, 0, 1}, operand, operand, c.data(), 3, false, SumOrder::kBlocks, pool);
  run({2, 3, 0}, operand, operand, c.data(), 3, true, SumOrder::kChain, pool);
  EXPECT_EQ(c, std::vector<float>(6, 5));
  run({2, 2, 0}, operand, operand, c.data(), 3, false, SumOrder::kBlocks, pool);
  EXPECT_EQ(c, (std::vector<float>{0, 0, 5, 0, 0, 5}));
}

// Pieces of lanes and pieces of k, as the packed operand's share of the workspace allows.
TEST(Product, ASmallerWorkspaceGivesTheSameBits) {
  std::mt19937 random(21);
  WorkerPool pool(2);
  for (const auto& [m, n, k] :
       {ProductShape{300, 900, 1100}, ProductShape{1400, 2, 300}, ProductShape{1, 20, 30000},
        ProductShape{4500, 4300, 3}, ProductShape{260, 260, 1500}}) {
    const Matrix a = make_matrix(ElementType::kF32, m, k, Layout::kColumnsAdjacent, 0, random);
    const Matrix b = make_matrix(ElementType::kF32, k, n, Layout::kRowsAdjacent, 0, random);
    for (const SumOrder order : {SumOrder::kBlocks, SumOrder::kChain}) {
      std::vector<float> most(static_cast<size_t>(m * n), 0.5f), least = most;
      run({m, n, k}, a.operand, b.operand, most.data(), n, true, order, pool);
      run({m, n, k}, a.operand, b.operand, least.data(), n, true, order, pool, kLeastPackedBytes);
      EXPECT_TRUE(same_bits(most, least)) << m << " " << n << " " << k;
    }
  }
}

TEST(Product, WorkspaceIsBounded) {
  const ProductShape shape{int64_t{1} << 24, int64_t{1} << 18, int64_t{1} << 17};
  for (DType type : {DType::kF32, DType::kF64}) {
    EXPECT_LE(product_workspace_bytes(shape, type, 8), int64_t{8 + 8} << 20);
  }
  EXPECT_LE(product_workspace_bytes({1, 1024, 1024}, DType::kF32, 1), 512 << 10);
}

// Callers plan for their largest product: the last chunk of rows is a smaller one.
TEST(Product, WorkspaceIsEnoughForEveryShapeWithin) {
  for (DType type : {DType::kF32, DType::kF64}) {
    for (int64_t k : {1, 64, 255, 256, 257, 1024, 4096, 151936}) {
      for (const int64_t packed : {kLeastPackedBytes, kMostPackedBytes}) {
        int64_t needed = 0;
        for (int64_t m = 1; m <= 5000; ++m) {
          const ProductShape shape{m, 49152, k};
          const ProductPlan plan(shape, size_of(type), packed);
          ASSERT_LE(plan.stationary_bytes, packed);
          needed = std::max(needed, plan.stationary_bytes + kStreamBytes);
          ASSERT_GE(product_workspace_bytes(shape, type, 1, packed), needed)
              << m << " rows of " << k;
          for (const int64_t more : {1, 256}) {
            ASSERT_GE(product_workspace_bytes({m, 49152, k + more}, type, 1, packed), needed)
                << m << " of " << k;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace ullage::cpu
