// Which attention `scaled_dot_product_attention` takes on a CUDA device of compute capability 9.0 with cuDNN > 9.15.1.
//
// A build without CUDA has no such choice. What it is made of, though, is in the header that the builds share, and so
// is PyTorch's own here: shapes, strides, heads, masks, dtypes. Only what `sdp_utils.cpp` of the CUDA build adds is
// written anew: limits of cuDNN and flash attention, alignment of the memory-efficient kernel, the order of preference.

#pragma once

#include <array>
#include <cmath>

#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <torch/version.h>

namespace attention_choice {

inline bool cudnn_takes_dropout(double dropout) {
#if TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR >= 212
  return dropout * 16 == std::floor(dropout * 16);  // its resolution, which callers are not to stumble over
#else
  return true;
#endif
}

inline bool takes_cudnn(const sdp::sdp_params& call) {
  constexpr auto dtypes = std::array<at::ScalarType, 2>{at::kHalf, at::kBFloat16};
  if (!sdp::check_tensor_shapes(call, false) || !sdp::check_tensor_dtype(call, dtypes, false) ||
      !sdp::check_attn_mask_shape(call, false) || !cudnn_takes_dropout(call.dropout) ||
      !sdp::check_nonzero_sequence_lengths_dense(call, false) ||
      !sdp::check_last_dim_stride_equals_1_dense<true>(call, false) ||
      !sdp::check_batch_size_and_num_heads_dense<true, false>(call, false)) {
    return false;
  }
  auto queries = call.query.size(2), keys = call.key.size(2);
  auto width = call.query.size(3), value_width = call.value.size(3);
  bool narrow = (width <= 128 && value_width <= 128) || (width == 192 && value_width == 128);
  return narrow && width % 8 == 0 && value_width % 8 == 0 && keys != 1 && !(call.dropout != 0 && queries == 1);
}

inline bool takes_flash(const sdp::sdp_params& call) {
  constexpr auto dtypes = std::array<at::ScalarType, 2>{at::kHalf, at::kBFloat16};
  if (!sdp::check_tensor_shapes(call, false) || !sdp::check_for_attn_mask(call, false) ||
      !sdp::check_tensor_dtype(call, dtypes, false) || !sdp::check_nonzero_sequence_lengths_dense(call, false) ||
      !sdp::check_batch_size_and_num_heads_dense<true>(call, false) ||
      !sdp::check_last_dim_stride_equals_1_dense<true>(call, false)) {
    return false;
  }
  auto width = call.query.size(3);
  bool square = call.query.size(2) == call.key.size(2);
  return width == call.key.size(3) && width == call.value.size(3) && width <= 256 && (square || !call.is_causal);
}

#if TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR >= 214
constexpr bool kEfficientGroupsHeads = true;
#else
constexpr bool kEfficientGroupsHeads = false;
#endif

inline bool takes_efficient(const sdp::sdp_params& call) {
  constexpr auto dtypes = std::array<at::ScalarType, 3>{at::kHalf, at::kFloat, at::kBFloat16};
  if (!sdp::check_tensor_shapes(call, false) || !sdp::check_tensor_dtype(call, dtypes, false) ||
      !sdp::check_nonzero_sequence_lengths_dense(call, false) ||
      !sdp::check_last_dim_stride_equals_1_dense<false>(call, false) ||
      !sdp::check_batch_size_and_num_heads_dense<kEfficientGroupsHeads>(call, false)) {
    return false;
  }
  auto alignment = call.query.scalar_type() == at::kFloat ? 4 : 8;
  auto aligned = [&](int64_t width) { return width > 0 && width % alignment == 0; };
  return call.query.size(3) == call.key.size(3) && aligned(call.query.size(3)) && aligned(call.value.size(3));
}

inline sdp::SDPBackend choose(const sdp::sdp_params& call) {
  if (takes_cudnn(call)) return sdp::SDPBackend::cudnn_attention;
  if (takes_flash(call)) return sdp::SDPBackend::flash_attention;
  if (takes_efficient(call)) return sdp::SDPBackend::efficient_attention;
  return sdp::SDPBackend::math;
}

}  // namespace attention_choice
