// Streams, events, and the hardware queues ("channels") that run their operations.
//
// A channel is a FIFO with a worker thread. A stream's operations go through one channel, in order; several streams may share
// one (setting `connections`), and then an operation that waits holds up the others' too, as on real hardware.
#pragma once

#include <deque>
#include <functional>
#include <random>

#include "memory.h"

namespace tdsim {

// One recording of an event. A wait keeps the recording it found, so recording the event again does not release it.
struct Recording {
  bool done = false;
  Clock::time_point time;
};

struct Event {
  Context *context;
  unsigned flags;
  std::shared_ptr<Recording> latest;  // nullptr: never recorded, and nothing waits for it
};

struct Operation {
  const char *what;
  std::vector<Range> touches;  // memory that must stay and hold still until this is done
  bool delayed = false;        // subject to delay_us
  bool gate = false;           // waits for somebody else: what is behind it may not rely on anything yet
  bool even_if_broken = false;  // runs in a broken context too

  // Polled with State::mutex held; the operation runs once this is true.
  std::function<bool()> ready;
  bool polled = false;  // `ready` looks at memory that the host changes without telling
  // Called with State::mutex held, once nothing before this operation can lawfully use its memory any more.
  std::function<void()> arm;
  // Called without the lock.
  std::function<void()> run;

  // Filled in by enqueue().
  std::shared_ptr<Stream> stream;
  uint64_t sequence = 0;
  std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>> after;  // the legacy stream's implicit order

  bool implicit_order_done() const;
};

struct Channel {
  std::deque<Operation> queue;  // the front one is running
  std::condition_variable arrived;
  std::mt19937 random;
  long number = 0;
  bool closed = false;  // its stream was destroyed; the worker ends once the queue is empty
};

struct Stream {
  Context *context;
  unsigned flags;
  long id;
  uint64_t enqueued = 0;
  uint64_t done = 0;
  std::shared_ptr<Channel> own;      // made when first needed
  std::shared_ptr<Channel> channel;  // where its pending operations are
  long config_epoch = -1;

  bool idle() const { return done == enqueued; }
  bool blocking() const { return !(flags & CU_STREAM_NON_BLOCKING); }
  ~Stream();
};

// All of these: State::mutex held.
std::shared_ptr<Stream> make_stream(Context &context, unsigned flags);
void reseed(Channel &channel);  // from the setting `seed`
void reseed_all();

// The stream behind a handle (0 and 1 are the legacy default stream). nullptr, with a violation, if it does not exist or
// belongs to another context than the current one.
std::shared_ptr<Stream> find_stream(CUstream handle, const char *function);
std::shared_ptr<Event> find_event(CUevent handle, const char *function, bool any_context = false);

// The channel's random delay, in microseconds, by the settings.
std::chrono::microseconds draw_delay(Channel &channel);
Channel &channel_of(Stream &stream);

// Appends to the stream. Blocks while its channel is full (`queue_depth`).
CUresult enqueue(Lock &lock, const std::shared_ptr<Stream> &stream, Operation operation);

bool in_flight(const Range &range);
long pending();

// Waits for everything enqueued so far in the context. False, with a violation, if that hangs.
bool drain(Lock &lock, Context &context, const char *function);

}  // namespace tdsim
