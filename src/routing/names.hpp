// SPDX-License-Identifier: Apache-2.0
// Names of recorded tensors and of the files containing them.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace switchyard::detail {

/// Parts of a name `[layer{l}.][rank{r}.]topk_ids` or `..topk_weights`; -1 if a part is missing.
struct TensorName {
  int layer = -1;
  int rank = -1;
  bool is_weights = false;
};

/// Returns nullopt if `name` has a different form. Numbers have 1 to 6 digits.
std::optional<TensorName> parse_tensor_name(std::string_view name);
std::string format_tensor_name(const TensorName& name);

/// Returns `path` with the last `topk_ids` in its file name replaced by `topk_weights`; nullopt if the file name does not
/// contain it.
std::optional<std::string> weights_path(const std::string& path);

}  // namespace switchyard::detail
