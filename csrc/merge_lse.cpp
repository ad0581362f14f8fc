// Merge of attention partials by their log-sum-exp: one pass in fp32 (fp64 for doubles), rounded once.
//
// A query's attention over disjoint ranges of keys gives partials (out_i, lse_i). Over their union it is
//     lse = log sum_i exp(lse_i),    out = sum_i exp(lse_i - lse) out_i.
// Done tensor by tensor in PyTorch this reads and writes fp32 temporaries of the size of `out` several times; here every
// partial is read once and the result written once. slimpipe/kernels/merge.py has the same in plain PyTorch.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

namespace {

// Work below this many elements a thread costs less than waking the thread.
constexpr int64_t kGrainElements = 32768;

template <typename T>
struct Partial {
  const T* out;  // [b, s, h, d], d contiguous
  int64_t out_b, out_s, out_h;
};

template <typename A>
struct PartialLse {
  const A* lse;  // [b, h, s]
  int64_t lse_b, lse_h, lse_s;
};

// T: type of the outputs; A: type of the LSEs and of all arithmetic.
template <typename T, typename A>
void merge_rows(const at::TensorList outs, const at::TensorList lses, at::Tensor& out, at::Tensor& lse) {
  const int64_t count = static_cast<int64_t>(outs.size());
  const int64_t S = out.size(1), H = out.size(2), D = out.size(3);
  const int64_t rows = out.size(0) * S * H;

  std::vector<Partial<T>> partials;
  std::vector<PartialLse<A>> partial_lses;
  for (int64_t i = 0; i < count; ++i) {
    partials.push_back({outs[i].const_data_ptr<T>(), outs[i].stride(0), outs[i].stride(1), outs[i].stride(2)});
    partial_lses.push_back({lses[i].const_data_ptr<A>(), lses[i].stride(0), lses[i].stride(1), lses[i].stride(2)});
  }
  T* const out_data = out.mutable_data_ptr<T>();
  A* const lse_data = lse.mutable_data_ptr<A>();
  constexpr A kNegInf = -std::numeric_limits<A>::infinity();

  // A row belongs to one thread from start to end, so the result does not depend on the number of threads.
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, count * D));
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<A> weight(count);
    std::vector<A> sum(D);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t h = row % H, s = (row / H) % S, b = row / (H * S);

      A highest = kNegInf;
      for (int64_t i = 0; i < count; ++i) {
        const auto& p = partial_lses[i];
        weight[i] = p.lse[b * p.lse_b + h * p.lse_h + s * p.lse_s];
        highest = std::max(highest, weight[i]);  // ignores a NaN, which shows in the total
      }

      A total = 0;
      for (int64_t i = 0; i < count; ++i) {
        // -inf - -inf is NaN, so a partial that saw no key gets its weight without arithmetic.
        weight[i] = weight[i] == kNegInf ? A(0) : std::exp(weight[i] - highest);
        total += weight[i];
      }
      lse_data[(b * H + h) * S + s] = total == A(0) ? kNegInf : highest + std::log(total);

      std::fill(sum.begin(), sum.end(), A(0));
      for (int64_t i = 0; i < count; ++i) {
        const auto& p = partial_lses[i];
        // What a kernel writes for a query without keys is its own business (0, or NaN from 0/0): never read it.
        if (p.lse[b * p.lse_b + h * p.lse_h + s * p.lse_s] == kNegInf) continue;
        // exp(lse_i - lse) as a quotient: the rounding of lse, large where |lse| is, stays out of the weights.
        const A w = weight[i] / total;
        const T* const x = partials[i].out + b * partials[i].out_b + s * partials[i].out_s + h * partials[i].out_h;
        for (int64_t j = 0; j < D; ++j) sum[j] += w * static_cast<A>(x[j]);
      }
      T* const y = out_data + row * D;
      for (int64_t j = 0; j < D; ++j) y[j] = static_cast<T>(sum[j]);
    }
  });
}

// outs: [b, s, h, d] each; lses: [b, h, s] each. Returns (out [b, s, h, d], lse [b, h, s]), both contiguous.
std::tuple<at::Tensor, at::Tensor> merge_lse(at::TensorList outs, at::TensorList lses) {
  TORCH_CHECK(!outs.empty() && outs.size() == lses.size(), "merge_lse: needs as many lses as outs, and at least one");
  TORCH_CHECK(outs[0].dim() == 4, "merge_lse: outs must be [b, s, h, d], got ", outs[0].sizes());
  const auto type = outs[0].scalar_type();
  const auto lse_type = type == at::kDouble ? at::kDouble : at::kFloat;
  const int64_t B = outs[0].size(0), S = outs[0].size(1), H = outs[0].size(2);
  const std::vector<int64_t> lse_shape{B, H, S};

  std::vector<at::Tensor> rows;
  for (size_t i = 0; i < outs.size(); ++i) {
    TORCH_CHECK(outs[i].device().is_cpu() && lses[i].device().is_cpu(), "merge_lse: partial ", i, " is not on the CPU");
    TORCH_CHECK(
        outs[i].sizes() == outs[0].sizes() && outs[i].scalar_type() == type,
        "merge_lse: out ", i, " is ", outs[i].scalar_type(), outs[i].sizes(), ", out 0 is ", type, outs[0].sizes());
    TORCH_CHECK(
        lses[i].sizes() == at::IntArrayRef(lse_shape) && lses[i].scalar_type() == lse_type,
        "merge_lse: lse ", i, " is ", lses[i].scalar_type(), lses[i].sizes(), ", expected ", lse_type, lse_shape);
    rows.push_back(outs[i].stride(3) == 1 ? outs[i] : outs[i].contiguous());
  }

  auto out = at::empty(outs[0].sizes(), outs[0].options());
  auto lse = at::empty(lse_shape, lses[0].options());
  switch (type) {
    case at::kFloat: merge_rows<float, float>(rows, lses, out, lse); break;
    case at::kDouble: merge_rows<double, double>(rows, lses, out, lse); break;
    case at::kBFloat16: merge_rows<at::BFloat16, float>(rows, lses, out, lse); break;
    default: TORCH_CHECK(false, "merge_lse: outs are ", type, "; supported are float32, float64 and bfloat16");
  }
  return {out, lse};
}

}  // namespace

TORCH_LIBRARY(slimpipe, m) {
  m.def("merge_lse(Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(slimpipe, CPU, m) {
  m.impl("merge_lse", merge_lse);
}
