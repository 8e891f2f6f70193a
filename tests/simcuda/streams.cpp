#include "streams.h"

#include <algorithm>
#include <thread>

#include "faults.h"

namespace tdsim {
namespace {

// Arms what can be armed in this stream: an operation may be armed when no gate (a wait, a host function) and no use of the
// same memory is ahead of it. Only then is "the source may not change" (or "nobody reads the destination") a rule of CUDA.
void arm_reachable(const Stream &stream, std::deque<Operation> &queue) {
  std::vector<Range> ahead;
  for (Operation &operation : queue) {
    if (operation.stream.get() != &stream) continue;
    if (operation.gate || !operation.implicit_order_done()) return;
    const bool used = std::any_of(operation.touches.begin(), operation.touches.end(), [&](const Range &range) {
      return std::any_of(ahead.begin(), ahead.end(), [&](const Range &other) { return range.overlaps(other); });
    });
    if (operation.arm && !used) {
      operation.arm();
      operation.arm = nullptr;
    }
    ahead.insert(ahead.end(), operation.touches.begin(), operation.touches.end());
  }
}

template <class T>
void forget_expired(std::vector<std::weak_ptr<T>> &list) {
  list.erase(std::remove_if(list.begin(), list.end(), [](const auto &weak) { return weak.expired(); }), list.end());
}

void wait_until_ready(Lock &lock, Operation &operation) {
  auto ready = [&] { return operation.implicit_order_done() && (!operation.ready || operation.ready()); };
  auto &s = state();
  if (wait_progress(lock, 1, operation.polled ? kPolled : kNotified,
                    [&] { return ready() || operation.stream->context->broken || s.exiting; })) {
    return;
  }
  s.violation("hang: stream " + std::to_string(operation.stream->id) + " stuck in " + operation.what);
  operation.stream->context->broken = CUDA_ERROR_LAUNCH_TIMEOUT;  // lets everything behind it pass, without running
}

void work(const std::shared_ptr<Channel> &channel) {
  auto &s = state();
  Lock lock(s.mutex);
  for (;;) {
    channel->arrived.wait(lock, [&] { return !channel->queue.empty() || channel->closed; });
    if (channel->queue.empty()) return;
    Operation &operation = channel->queue.front();  // stays in the queue while it runs: in_flight() looks there
    if (operation.delayed) {
      const auto delay = draw_delay(*channel);
      lock.unlock();
      std::this_thread::sleep_for(delay);
      lock.lock();
    }
    wait_until_ready(lock, operation);
    if (s.exiting) return;
    const auto stream = operation.stream;
    if (operation.arm) operation.arm();
    if (operation.run && (operation.even_if_broken || !stream->context->broken)) {
      lock.unlock();
      operation.run();
      lock.lock();
    }
    stream->done = operation.sequence;
    channel->queue.pop_front();
    arm_reachable(*stream, channel->queue);
    s.last_progress = Clock::now();
    s.progress.notify_all();
  }
}

std::shared_ptr<Channel> make_channel() {
  auto &s = state();
  static long made = 0;
  auto channel = std::make_shared<Channel>();
  channel->number = made++;
  reseed(*channel);
  forget_expired(s.channels);
  s.channels.push_back(channel);
  std::thread(work, channel).detach();
  return channel;
}

std::shared_ptr<Channel> choose_channel(Stream &stream) {
  const auto connections = size_t(state().config.connections);
  if (!connections) {
    if (!stream.own) stream.own = make_channel();
    return stream.own;
  }
  auto &shared = stream.context->shared_channels;
  const size_t index = size_t(stream.id) % connections;
  while (shared.size() <= index) shared.push_back(make_channel());
  return shared[index];
}

}  // namespace

bool Operation::implicit_order_done() const {
  return std::all_of(after.begin(), after.end(), [](const auto &entry) { return entry.first->done >= entry.second; });
}

Stream::~Stream() {
  if (!own) return;
  own->closed = true;
  own->arrived.notify_all();
}

std::shared_ptr<Stream> make_stream(Context &context, unsigned flags) {
  static long made = 0;
  auto stream = std::make_shared<Stream>();
  stream->context = &context;
  stream->flags = flags;
  stream->id = made++;
  forget_expired(context.streams);
  context.streams.push_back(stream);
  return stream;
}

void reseed(Channel &channel) { channel.random.seed(unsigned(state().config.seed * 7919 + channel.number)); }

void reseed_all() {
  for (const auto &weak : state().channels) {
    if (const auto channel = weak.lock()) reseed(*channel);
  }
}

std::shared_ptr<Stream> find_stream(CUstream handle, const char *function) {
  auto &s = state();
  Context &context = *current_context();
  const auto key = reinterpret_cast<uintptr_t>(handle);
  if (key <= 1) {
    if (!context.legacy) context.legacy = make_stream(context, CU_STREAM_DEFAULT);
    return context.legacy;
  }
  const auto it = s.streams.find(key);
  if (it == s.streams.end()) {
    s.violation(std::string(function) + ": no such stream (destroyed, or never created)");
    return nullptr;
  }
  if (it->second->context != &context) {
    s.violation(std::string(function) + ": stream of another context than the current one");
    return nullptr;
  }
  return it->second;
}

std::shared_ptr<Event> find_event(CUevent handle, const char *function, bool any_context) {
  auto &s = state();
  const auto it = s.events.find(reinterpret_cast<uintptr_t>(handle));
  if (it == s.events.end()) {
    s.violation(std::string(function) + ": no such event (destroyed, or never created)");
    return nullptr;
  }
  if (!any_context && it->second->context != current_context()) {
    s.violation(std::string(function) + ": event of another context than the current one");
    return nullptr;
  }
  return it->second;
}

std::chrono::microseconds draw_delay(Channel &channel) {
  const auto &config = state().config;
  if (config.delay_us <= 0) return std::chrono::microseconds(0);
  const auto limit = unsigned(config.delay_us);
  return std::chrono::microseconds(config.fixed_delay ? limit : channel.random() % (limit + 1));
}

Channel &channel_of(Stream &stream) {
  auto &s = state();
  // A change of `connections` reaches streams that exist already as soon as they are idle; moving earlier would break the
  // order of their operations.
  if (!stream.channel || (stream.idle() && stream.config_epoch != s.config_epoch)) {
    stream.channel = choose_channel(stream);
    stream.config_epoch = s.config_epoch;
  }
  return *stream.channel;
}

CUresult enqueue(Lock &lock, const std::shared_ptr<Stream> &stream, Operation operation) {
  auto &s = state();
  auto full = [&] { return s.config.queue_depth && long(channel_of(*stream).queue.size()) >= s.config.queue_depth; };
  if (full()) {
    s.stats["enqueue_blocked"]++;
    if (!wait_progress(lock, 2, kNotified, [&] { return !full(); })) {
      s.violation(std::string("hang: the queue stays full: ") + operation.what);
      return stream->context->broken = CUDA_ERROR_LAUNCH_TIMEOUT;
    }
  }
  Channel &channel = channel_of(*stream);
  Context &context = *stream->context;
  operation.stream = stream;
  operation.sequence = ++stream->enqueued;
  if (stream == context.legacy) {
    for (const auto &weak : context.streams) {
      const auto other = weak.lock();
      const bool counts = other && other != stream && other->blocking() && !other->idle();
      if (counts) operation.after.push_back({other, other->enqueued});
    }
  } else if (stream->blocking() && context.legacy && !context.legacy->idle()) {
    operation.after.push_back({context.legacy, context.legacy->enqueued});
  }
  channel.queue.push_back(std::move(operation));
  arm_reachable(*stream, channel.queue);
  channel.arrived.notify_all();
  return CUDA_SUCCESS;
}

bool in_flight(const Range &range) {
  for (const auto &weak : state().channels) {
    const auto channel = weak.lock();
    if (!channel) continue;
    for (const Operation &operation : channel->queue) {
      for (const Range &touched : operation.touches) {
        if (touched.overlaps(range)) return true;
      }
    }
  }
  return false;
}

long pending() {
  size_t count = 0;
  for (const auto &weak : state().channels) {
    if (const auto channel = weak.lock()) count += channel->queue.size();
  }
  return long(count);
}

bool drain(Lock &lock, Context &context, const char *function) {
  auto &s = state();
  std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>> enqueued;
  for (const auto &weak : context.streams) {
    const auto stream = weak.lock();
    if (stream && !stream->idle()) enqueued.push_back({stream, stream->enqueued});
  }
  auto done = [&] {
    return std::all_of(enqueued.begin(), enqueued.end(), [](const auto &e) { return e.first->done >= e.second; });
  };
  if (done()) return true;
  s.stats[std::string("implicit_sync:") + function]++;
  if (wait_progress(lock, 3, kNotified, done)) return true;
  s.violation(std::string("hang: ") + function + " waits for the context");
  return false;
}

}  // namespace tdsim
