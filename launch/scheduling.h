// Where and how urgently threads run: which CPUs, how many threads a rank may use, and who goes first.
#pragma once

#include <string>

namespace kintsugi::launch {

// For threads that sleep nearly always and must run the moment they are woken, however busy the cores are: those that
// pass on news of a death. Asks for what the system grants: a short time slice (no privilege needed, Linux 6.12), and a
// better nice value. The thread's children start with ordinary values.
void make_thread_urgent();

// For a spare's start-up, which runs beside training: the calling thread's nice value, once.
void make_thread_yielding();

}  // namespace kintsugi::launch
