// SPDX-License-Identifier: Apache-2.0
// Word-related helpers for messages: suggestions, lists, and lines of limited width.
#pragma once

#include <string>
#include <vector>

namespace switchyard::tool {

/// `text` in lower case with '_' replaced by '-', the form in which command-line words are compared.
std::string canonical(std::string text);
/// The candidate with the smallest edit distance (a transposition counts as one edit) if it is close enough to be a typo, else
/// "".
std::string closest(const std::string& text, const std::vector<std::string>& candidates);
/// " Did you mean '--ranks'?" or "". Also translates "gpu" and flags that have a different name in other verbs.
std::string did_you_mean(const std::string& text, const std::vector<std::string>& candidates);

/// Breaks `text` into lines of at most `width` columns.
std::string wrapped(const std::string& text, size_t width);
std::string joined(const std::vector<std::string>& parts, const std::string& separator);
std::vector<std::string> split(const std::string& text, char separator);

}  // namespace switchyard::tool
