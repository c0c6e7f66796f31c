// How the agents of a job find each other: once, at the start. Rank 0 listens on an abstract Unix socket (no file, no
// port, gone with the process); its random name travels by whatever the launcher offers:
//   mpirun      MPI_Init, MPI_Allgather, MPI_Finalize at once: MPI is never on the recovery path
//   torchrun    a store that rank 0 serves at MASTER_ADDR:MASTER_PORT; when torchrun itself serves one there
//               (TORCHELASTIC_USE_AGENT_STORE), the name is derived from the job's key instead
//   Slurm       the name is derived from the job's and step's number
//   none        one rank: nobody to meet
// A derived name is not secret, so every hello is checked: the user, and the job's key.
#pragma once

#include <memory>
#include <string>

#include "launch/channel.h"
#include "launch/rank_facts.h"
#include "launch/unique_fd.h"
#include "runtime/base/deadline.h"
#include "runtime/base/status.h"

namespace kintsugi::launch {

struct MeetingPoint {
  std::string socket_name;            // abstract, without the leading zero byte
  std::string token;                  // who says it in its hello belongs to the job
  UniqueFd listener;                  // rank 0's; non-blocking
  std::shared_ptr<void> keeps_alive;  // rank 0's store, until all have come
};

// May fill in what only MPI knows of `facts`. Waits for the other ranks where the launcher's way needs them, until the
// deadline.
Result<MeetingPoint> agree_on_meeting_point(RankFacts& facts, const Environment& environment, Deadline deadline);

// Other ranks: one attempt to reach rank 0. kUnavailable: not there yet, try again.
Result<Channel> try_to_join(const MeetingPoint& point);
// Rank 0: the next one who came, or a closed channel when there is none. kFailedPrecondition: another user's process.
Result<Channel> accept_one(const MeetingPoint& point);

// Whether two processes share a machine: the same text on both.
std::string host_identity();

}  // namespace kintsugi::launch
