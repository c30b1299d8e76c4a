// SPDX-License-Identifier: Apache-2.0
#include "cli/words.hpp"

#include <algorithm>
#include <cctype>
#include <limits>

#include "cli/flags.hpp"

namespace switchyard::tool {
namespace {

/// Edit distance with insertions, deletions, substitutions and swaps of neighbors, each at a cost of 1.
size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        d[i][j] = i + j;
        continue;
      }
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1] ? 1 : 0)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

}  // namespace

std::string canonical(std::string text) {
  for (char& c : text) c = c == '-' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

std::string joined(const std::vector<std::string>& parts, const std::string& separator) {
  std::string out;
  for (const std::string& part : parts) out += (&part == parts.data() ? "" : separator) + part;
  return out;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

std::string wrapped(const std::string& text, size_t width) {
  std::string out;
  size_t column = 0;
  for (const std::string& paragraph : split(text, '\n')) {
    if (!out.empty()) out += '\n';
    column = 0;
    for (const std::string& word : split(paragraph, ' ')) {
      if (column > 0 && column + 1 + word.size() > width) {
        out += '\n';
        column = 0;
      }
      if (column > 0) {
        out += ' ';
        ++column;
      }
      out += word;
      column += word.size();
    }
  }
  return out;
}

std::string closest(const std::string& text, const std::vector<std::string>& candidates) {
  const std::string wanted = canonical(text);
  std::string best;
  size_t best_distance = std::numeric_limits<size_t>::max();
  for (const std::string& candidate : candidates) {
    const std::string c = canonical(candidate);
    size_t distance = edit_distance(wanted, c);
    if (wanted.size() >= 3 && c.size() > wanted.size() && c.compare(0, wanted.size(), wanted) == 0)
      distance = 1;  // abbreviated
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  const size_t tolerated = std::max<size_t>(1, canonical(best).size() / 3);
  return best_distance <= tolerated ? best : "";
}

std::string did_you_mean(const std::string& text, const std::vector<std::string>& candidates) {
  const std::string same = same_flag(text, candidates), best = same.empty() ? closest(text, candidates) : same;
  return best.empty() ? "" : " Did you mean '" + best + "'?";
}

}  // namespace switchyard::tool
