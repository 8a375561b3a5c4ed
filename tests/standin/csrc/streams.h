// Streams that are late: what is put on one runs when somebody has to wait for it, or at once,
// as the test says.
//
// There are no threads and no delays: the schedule is the same in each run. A *late* stream runs
// nothing until the host or another stream waits for it, the latest that a device may be. A
// *prompt* stream runs each item as soon as what it waits for is done, the earliest. Which of two
// streams is late decides which missing wait shows as wrong numbers.
#pragma once

#include <cstdint>
#include <functional>

namespace standin {

constexpr int kDevices = 2;
constexpr int64_t kStreams = 33;  // of each device: the default stream, and a pool of others

// What was on a stream at some time: the items up to `position`, which counts from 1.
struct Place {
  int device = 0;
  int64_t stream = 0;
  uint64_t position = 0;

  bool operator==(const Place&) const = default;
};

// Puts work on a stream. It must not call back into the device.
Place enqueue(int device, int64_t stream, std::function<void()> work);
// The stream goes on only after that place.
void wait_on_stream(int device, int64_t stream, const Place& place);
// Everything that is on the stream by now.
Place end_of(int device, int64_t stream);

bool is_reached(const Place& place);
// The host waits. Raises what went wrong in work that nobody waited for until now.
void reach(const Place& place);
void reach_all(int device);
// As `reach`, where no device would have waited: work that this one does on the host's thread.
void drain(int device, int64_t stream);
// Asking takes a moment: one more item of a late stream is done after it.
bool ask(const Place& place);
// Puts a look at the device's own clock on a stream, and gives the microseconds it showed there.
Place note_time(int device, int64_t stream);
double reached_at(const Place& place);

void set_late(bool default_streams, bool other_streams);
// How often the host waited for a stream, and how many items were on streams in all.
int64_t num_waits();
int64_t num_items();

// What a thread of the host works with.
int current_device();
void set_current_device(int device);
int64_t current_stream(int device);
void set_current_stream(int device, int64_t stream);
int64_t next_pool_stream(int device);

}  // namespace standin
