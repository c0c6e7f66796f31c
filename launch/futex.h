// Waiting on a 32-bit word of memory that processes share.
#pragma once

#include <atomic>
#include <cstdint>

#include "runtime/base/deadline.h"

namespace kintsugi::launch {

// Sleeps while *word == seen, until a wake or the deadline. May return early for no reason: check and call again.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t seen, Deadline deadline);
// Adds one to the word and wakes every process that waits on it.
void futex_signal(std::atomic<uint32_t>& word);

}  // namespace kintsugi::launch
