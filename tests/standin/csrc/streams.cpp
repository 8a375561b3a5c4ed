#include "streams.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <deque>
#include <exception>
#include <map>
#include <mutex>

namespace standin {
namespace {

constexpr size_t kMostQueued = 1024;  // as a driver's own queue, it is not without end
constexpr double kItemMicroseconds = 10;

struct Item {
  std::function<void()> work;  // empty where the item only waits
  Place awaited;
};

struct Stream {
  std::deque<Item> items;
  uint64_t enqueued = 0;
  uint64_t done = 0;
  bool is_late = true;
  double microseconds = 0;
  std::map<uint64_t, double> times;  // of places that tell time
};

std::recursive_mutex mutex;
std::array<std::array<Stream, kStreams>, kDevices> streams;
std::exception_ptr failure;  // of work that nobody has waited for yet
int64_t waits = 0;
int64_t items = 0;

Stream& at(int device, int64_t stream) { return streams.at(device).at(stream); }

bool is_done(const Place& place) { return at(place.device, place.stream).done >= place.position; }

void force(const Place& place);

void run_first(Stream& stream) {
  Item item = std::move(stream.items.front());
  stream.items.pop_front();
  if (item.awaited.position > 0) {
    force(item.awaited);
    stream.microseconds =
        std::max(stream.microseconds, at(item.awaited.device, item.awaited.stream).microseconds);
  }
  if (item.work) {
    try {
      item.work();
    } catch (...) {
      if (!failure) {
        failure = std::current_exception();
      }
    }
    stream.microseconds += kItemMicroseconds;
  }
  stream.done++;
}

void force(const Place& place) {
  Stream& stream = at(place.device, place.stream);
  while (stream.done < place.position) {
    run_first(stream);
  }
}

// Lets prompt streams run as far as they come without making a late one run.
void let_run() {
  for (bool has_run = true; has_run;) {
    has_run = false;
    for (auto& of_device : streams) {
      for (Stream& stream : of_device) {
        while (!stream.is_late && !stream.items.empty() && is_done(stream.items.front().awaited)) {
          run_first(stream);
          has_run = true;
        }
      }
    }
  }
}

Place put(int device, int64_t index, Item item) {
  Stream& stream = at(device, index);
  if (stream.items.size() >= kMostQueued) {
    run_first(stream);
  }
  stream.items.push_back(std::move(item));
  stream.enqueued++;
  items++;
  const Place place{device, index, stream.enqueued};
  let_run();
  return place;
}

void raise_failure() {
  if (failure) {
    std::rethrow_exception(std::exchange(failure, nullptr));
  }
}

struct Current {
  int device = 0;
  std::array<int64_t, kDevices> stream{};
};
thread_local Current current;

}  // namespace

Place enqueue(int device, int64_t stream, std::function<void()> work) {
  const std::lock_guard guard(mutex);
  return put(device, stream, {std::move(work), {}});
}

void wait_on_stream(int device, int64_t stream, const Place& place) {
  const std::lock_guard guard(mutex);
  const bool is_in_order = place.device == device && place.stream == stream;
  if (!is_in_order && !is_done(place)) {
    put(device, stream, {nullptr, place});
  }
}

Place end_of(int device, int64_t stream) {
  const std::lock_guard guard(mutex);
  return {device, stream, at(device, stream).enqueued};
}

bool is_reached(const Place& place) {
  const std::lock_guard guard(mutex);
  return is_done(place);
}

void reach(const Place& place) {
  const std::lock_guard guard(mutex);
  waits++;
  force(place);
  let_run();
  raise_failure();
}

void reach_all(int device) {
  const std::lock_guard guard(mutex);
  waits++;
  for (int64_t stream = 0; stream < kStreams; stream++) {
    force({device, stream, at(device, stream).enqueued});
  }
  let_run();
  raise_failure();
}

void drain(int device, int64_t stream) {
  const std::lock_guard guard(mutex);
  force({device, stream, at(device, stream).enqueued});
  let_run();
  raise_failure();
}

bool ask(const Place& place) {
  const std::lock_guard guard(mutex);
  if (is_done(place)) {
    return true;
  }
  run_first(at(place.device, place.stream));
  let_run();
  return false;
}

Place note_time(int device, int64_t stream) {
  const std::lock_guard guard(mutex);
  // An item of its own: what is on the stream already may be done, and would tell no time.
  return put(device, stream, {[&of = at(device, stream)] { of.times[of.done + 1] = of.microseconds; }, {}});
}

double reached_at(const Place& place) {
  const std::lock_guard guard(mutex);
  const Stream& stream = at(place.device, place.stream);
  const auto time = stream.times.find(place.position);
  TORCH_CHECK(is_done(place), "this event is not done yet: synchronize() it first");
  TORCH_CHECK(
      time != stream.times.end(), "this event tells no time: make it with enable_timing=True");
  return time->second;
}

void set_late(bool default_streams, bool other_streams) {
  const std::lock_guard guard(mutex);
  for (auto& of_device : streams) {
    for (int64_t index = 0; index < kStreams; index++) {
      of_device.at(index).is_late = index == 0 ? default_streams : other_streams;
    }
  }
  let_run();
}

int64_t num_waits() {
  const std::lock_guard guard(mutex);
  return waits;
}

int64_t num_items() {
  const std::lock_guard guard(mutex);
  return items;
}

int current_device() { return current.device; }

void set_current_device(int device) {
  TORCH_CHECK(
      device >= 0 && device < kDevices, "there is no device ", device, ": there are ", kDevices);
  current.device = device;
}

int64_t current_stream(int device) { return current.stream.at(device); }

void set_current_stream(int device, int64_t stream) { current.stream.at(device) = stream; }

int64_t next_pool_stream(int device) {
  static std::array<int64_t, kDevices> next{};
  const std::lock_guard guard(mutex);
  return 1 + next.at(device)++ % (kStreams - 1);
}

}  // namespace standin
