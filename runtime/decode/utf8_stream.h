// Bytes in, whole characters out: what makes streamed text printable. A token may end inside a character; the
// bytes of an unfinished one (at most 3) wait for the next token. Bytes that can begin no character become
// U+FFFD, one for each maximal part of a sequence, as Python's errors="replace" and the Unicode Standard's
// recommendation (section 3.9) do. So the pieces joined equal the whole text decoded at once.
#pragma once

#include <string>
#include <string_view>

namespace kintsugi::runtime {

class Utf8Stream {
 public:
  // Valid UTF-8: what is complete with these bytes.
  std::string push(std::string_view bytes);
  // The end of the text: an unfinished character becomes U+FFFD. The stream is empty again.
  std::string finish();

 private:
  std::string held_;  // a proper prefix of a character
};

}  // namespace kintsugi::runtime
