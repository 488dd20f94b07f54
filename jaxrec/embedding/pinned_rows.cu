// Rows in host memory, read and written by the threads of a device inside of XLA programs.
//
// One source for both: nvcc compiles it for GPUs, whose threads reach registered host memory over the link, and a C++
// compiler for CPUs. What a thread does is the same code; only the launch differs. All threads of a launch write
// different records, so that their order is free.
//
// A record is a row with its slots, padded to 16 bytes, which one thread moves at a time.
//
// `read_rows` and `put_rows` are in the order of the programs. `begin_read` and `begin_put` go on beside the programs
// that follow, until `end_read`, or until rows are read or put in order. Puts end in the order of their beginning.
//
// Legend: S shards of all devices, S' shards of this device, U padded unique rows per shard, L 16-byte lanes of a record.

#include <cstdint>
#include <mutex>

#include "xla/ffi/api/ffi.h"

#ifdef __CUDACC__
#include <cuda_runtime.h>
#define ANYWHERE __host__ __device__ inline
#else
#include <algorithm>
#include <deque>
#include <numeric>
#include <random>
#include <vector>
#define ANYWHERE inline
struct alignas(16) float4 {
  float x, y, z, w;
};
#endif

namespace ffi = xla::ffi;
using Integers = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;

namespace {

// The records of a batch: i32[S', U] unique, i32[S'] count, and where the shards begin, i32[S', 2], as halves of 64 bits.
struct Records {
  const int32_t *unique, *count, *address;
  int64_t shards_here, capacity, lanes, shards, rows_per_shard;

  // The record of a place in [S', U]; null for padding, and for a row that the shard lacks.
  ANYWHERE float4* at(int64_t place) const {
    int64_t shard = place / capacity, row = unique[place] / shards;
    if (place % capacity >= count[shard] || unique[place] < 0 || row >= rows_per_shard) return nullptr;
    uint64_t low = static_cast<uint32_t>(address[2 * shard]), high = static_cast<uint32_t>(address[2 * shard + 1]);
    return reinterpret_cast<float4*>(high << 32 | low) + row * lanes;
  }
};

// out[s, u] = the record of unique[s, u], zeros for padding.
struct Read {
  Records records;
  float4* out;  // [S', U, L]
  ANYWHERE void operator()(int64_t thread, int64_t threads) const {
    int64_t moves = records.shards_here * records.capacity * records.lanes;
    for (int64_t i = thread; i < moves; i += threads) {
      const float4* from = records.at(i / records.lanes);
      out[i] = from ? from[i % records.lanes] : float4{0, 0, 0, 0};
    }
  }
};

// The record of unique[s, u] = in[s, u].
struct Put {
  Records records;
  const float4* in;  // [S', U, L]
  ANYWHERE void operator()(int64_t thread, int64_t threads) const {
    int64_t moves = records.shards_here * records.capacity * records.lanes;
    for (int64_t i = thread; i < moves; i += threads)
      if (float4* to = records.at(i / records.lanes)) to[i % records.lanes] = in[i];
  }
};

// after[s] = before[s] + step: a result that makes the next program wait for this one.
struct Count {
  const int32_t* before;
  int32_t *after, step;
  int64_t shards_here;
  ANYWHERE void operator()(int64_t thread, int64_t threads) const {
    for (int64_t shard = thread; shard < shards_here; shard += threads) after[shard] = before[shard] + step;
  }
};

struct Zero {
  int32_t* out;
  ANYWHERE void operator()(int64_t thread, int64_t threads) const {
    if (thread == 0) *out = 0;
  }
};

#ifdef __CUDACC__

using Stream = ffi::PlatformStream<cudaStream_t>;
using On = cudaStream_t;

template <class Work>
__global__ void run(Work work) {
  work(static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, static_cast<int64_t>(gridDim.x) * blockDim.x);
}

ffi::Error ended(cudaError_t error) {
  return error == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(cudaGetErrorString(error));
}

// 32 blocks saturate the link, and leave the multiprocessors to what runs beside.
template <class Work>
ffi::Error launch(cudaStream_t stream, const Work& work) {
  run<<<32, 256, 0, stream>>>(work);
  return ended(cudaGetLastError());
}

// Streams of a device beside that of its programs; one for each direction of the link.
class Beside {
 public:
  static constexpr int64_t kEvents = 1024;

  // That of the device of the calling thread.
  static Beside& here() {
    static Beside all[64];
    int device = 0;
    cudaGetDevice(&device);
    all[device].create();
    return all[device];
  }

  // Read once all puts but the last `unfinished` have ended.
  ffi::Error begin_read(cudaStream_t stream, const Read& work, int64_t unfinished) {
    std::lock_guard<std::mutex> guard(lock_);
    follow(reads_, stream);
    if (begun_ > unfinished) cudaStreamWaitEvent(reads_, put_[(begun_ - unfinished - 1) % kEvents]);
    ffi::Error error = launch(reads_, work);
    cudaEventRecord(read_, reads_);
    return error;
  }

  ffi::Error end_read(cudaStream_t stream) { return ended(cudaStreamWaitEvent(stream, read_)); }

  ffi::Error begin_put(cudaStream_t stream, const Put& work) {
    std::lock_guard<std::mutex> guard(lock_);
    follow(puts_, stream);
    ffi::Error error = launch(puts_, work);
    cudaEventRecord(put_[begun_++ % kEvents], puts_);
    return error;
  }

  ffi::Error end_puts(cudaStream_t stream) {
    std::lock_guard<std::mutex> guard(lock_);
    return begun_ ? ended(cudaStreamWaitEvent(stream, put_[(begun_ - 1) % kEvents])) : ffi::Error::Success();
  }

  // For the host: wait until all that has begun has ended.
  void wait() {
    if (reads_) cudaStreamSynchronize(reads_);
    if (puts_) cudaStreamSynchronize(puts_);
  }

 private:
  void create() {
    std::lock_guard<std::mutex> guard(lock_);
    if (puts_) return;
    int least = 0, greatest = 0;
    cudaDeviceGetStreamPriorityRange(&least, &greatest);
    cudaStreamCreateWithPriority(&reads_, cudaStreamNonBlocking, greatest);
    cudaEventCreateWithFlags(&begin_, cudaEventDisableTiming);
    cudaEventCreateWithFlags(&read_, cudaEventDisableTiming);
    for (auto& event : put_) cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    cudaStreamCreateWithPriority(&puts_, cudaStreamNonBlocking, greatest);
  }

  // What is launched next on `mine` begins after all that was launched on the stream of the programs.
  void follow(cudaStream_t mine, cudaStream_t stream) {
    cudaEventRecord(begin_, stream);
    cudaStreamWaitEvent(mine, begin_);
  }

  std::mutex lock_;
  cudaStream_t reads_ = nullptr, puts_ = nullptr;
  cudaEvent_t begin_, read_, put_[kEvents];
  int64_t begun_ = 0;
};

#else

using Stream = ffi::ThreadPool;
using On = ffi::ThreadPool;
int64_t threads = 1;
uint32_t seed = 0, drawn = 0;

// Threads of a GPU run in any order: here they play one after the other, in an order drawn from the seed.
template <class Work>
ffi::Error launch(const ffi::ThreadPool&, const Work& work) {
  std::vector<int64_t> order(threads);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  for (int64_t thread : order) work(thread, threads);
  return ffi::Error::Success();
}

// Plays what goes on beside the programs. Without a seed a put ends at once. With one it ends as late as it may, and a
// read meets it at any point: not begun, half done, or ended.
class Beside {
 public:
  static Beside& here() {
    static Beside all;
    return all;
  }

  ffi::Error begin_read(const ffi::ThreadPool& pool, const Read& work, int64_t unfinished) {
    std::lock_guard<std::mutex> guard(lock_);
    std::mt19937 draw(seed + drawn++);
    while (!puts_.empty() && (static_cast<int64_t>(puts_.size()) > unfinished || draw() % 2)) end_first();
    if (!puts_.empty()) puts_.front().some(draw);
    return launch(pool, work);
  }

  ffi::Error end_read(const ffi::ThreadPool&) { return ffi::Error::Success(); }

  ffi::Error begin_put(const ffi::ThreadPool&, const Put& work) {
    std::lock_guard<std::mutex> guard(lock_);
    puts_.emplace_back(work);
    if (!seed) end_first();
    return ffi::Error::Success();
  }

  ffi::Error end_puts(const ffi::ThreadPool&) {
    wait();
    return ffi::Error::Success();
  }

  void wait() {
    std::lock_guard<std::mutex> guard(lock_);
    while (!puts_.empty()) end_first();
  }

 private:
  // A put with copies of its arguments.
  class Later {
   public:
    explicit Later(const Put& put)
        : records_(put.records),
          unique_(put.records.unique, put.records.unique + records_.shards_here * records_.capacity),
          count_(put.records.count, put.records.count + records_.shards_here),
          address_(put.records.address, put.records.address + 2 * records_.shards_here),
          in_(put.in, put.in + records_.shards_here * records_.capacity * records_.lanes) {}

    void all() { here()(0, 1); }

    void some(std::mt19937& draw) {
      int64_t parts = 2 + draw() % 7;
      for (int64_t part = 0; part < parts; ++part)
        if (draw() % 2) here()(part, parts);
    }

   private:
    Put here() {
      Records records = records_;
      records.unique = unique_.data(), records.count = count_.data(), records.address = address_.data();
      return {records, in_.data()};
    }

    Records records_;
    std::vector<int32_t> unique_, count_, address_;
    std::vector<float4> in_;
  };

  void end_first() {
    puts_.front().all();
    puts_.pop_front();
  }

  std::mutex lock_;
  std::deque<Later> puts_;
};

#endif

Records records_of(Integers unique, Integers count, Integers address, int64_t width, int64_t shards, int64_t rows) {
  auto shape = unique.dimensions();
  return {unique.typed_data(), count.typed_data(), address.typed_data(), shape[0], shape[1], width / 4, shards, rows};
}

ffi::Error count_on(On stream, Integers puts, ffi::Result<Integers> after, int32_t step) {
  return launch(stream, Count{puts.typed_data(), after->typed_data(), step, puts.dimensions()[0]});
}

// `puts` is not read: it makes a program that reads rows wait for the one that has put them.
ffi::Error read_rows(On stream, Integers unique, Integers count, Integers address, Integers puts,
                     ffi::Result<Floats> rows, int64_t shards, int64_t rows_per_shard) {
  Records records = records_of(unique, count, address, rows->dimensions()[2], shards, rows_per_shard);
  if (ffi::Error error = Beside::here().end_puts(stream); error.failure()) return error;
  return launch(stream, Read{records, reinterpret_cast<float4*>(rows->typed_data())});
}

ffi::Error put_rows(On stream, Integers unique, Integers count, Integers address, Integers puts, Floats rows,
                    ffi::Result<Integers> after, int64_t shards, int64_t rows_per_shard) {
  Records records = records_of(unique, count, address, rows.dimensions()[2], shards, rows_per_shard);
  if (ffi::Error error = Beside::here().end_puts(stream); error.failure()) return error;
  Put put{records, reinterpret_cast<const float4*>(rows.typed_data())};
  if (ffi::Error error = launch(stream, put); error.failure()) return error;
  return count_on(stream, puts, after, 1);
}

// Of `unfinished` puts begun before, the rows may be old, new or torn. The arguments must stay until `end_read`.
ffi::Error begin_read(On stream, Integers unique, Integers count, Integers address, Integers puts,
                      ffi::Result<Floats> rows, ffi::Result<Integers> after, int64_t shards, int64_t rows_per_shard,
                      int64_t unfinished) {
  Records records = records_of(unique, count, address, rows->dimensions()[2], shards, rows_per_shard);
  Read read{records, reinterpret_cast<float4*>(rows->typed_data())};
  if (ffi::Error error = Beside::here().begin_read(stream, read, unfinished); error.failure()) return error;
  return count_on(stream, puts, after, 0);
}

// `nothing` is 0: whoever adds it to an operand reads the rows after this.
ffi::Error end_read(On stream, Integers puts, ffi::Result<Integers> after, ffi::Result<Integers> nothing) {
  if (ffi::Error error = Beside::here().end_read(stream); error.failure()) return error;
  if (ffi::Error error = count_on(stream, puts, after, 0); error.failure()) return error;
  return launch(stream, Zero{nothing->typed_data()});
}

// The arguments must stay until the put has ended.
ffi::Error begin_put(On stream, Integers unique, Integers count, Integers address, Integers puts, Floats rows,
                     ffi::Result<Integers> after, int64_t shards, int64_t rows_per_shard) {
  Records records = records_of(unique, count, address, rows.dimensions()[2], shards, rows_per_shard);
  Put put{records, reinterpret_cast<const float4*>(rows.typed_data())};
  if (ffi::Error error = Beside::here().begin_put(stream, put); error.failure()) return error;
  return count_on(stream, puts, after, 1);
}

auto plan_and_puts() {
  return ffi::Ffi::Bind().Ctx<Stream>().Arg<Integers>().Arg<Integers>().Arg<Integers>().Arg<Integers>();
}

}  // namespace

#define OF_SPEC .Attr<int64_t>("shards").Attr<int64_t>("rows_per_shard")

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrec_read_rows, read_rows, plan_and_puts().Ret<Floats>() OF_SPEC);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrec_put_rows, put_rows, plan_and_puts().Arg<Floats>().Ret<Integers>() OF_SPEC);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrec_begin_read, begin_read,
                              plan_and_puts().Ret<Floats>().Ret<Integers>() OF_SPEC.Attr<int64_t>("unfinished"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrec_end_read, end_read,
                              ffi::Ffi::Bind().Ctx<Stream>().Arg<Integers>().Ret<Integers>().Ret<Integers>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrec_begin_put, begin_put, plan_and_puts().Arg<Floats>().Ret<Integers>() OF_SPEC);

extern "C" {

#ifdef __CUDACC__

// Give all GPUs access to memory of the host, at the address that it has there; null, or what is wrong.
const char* jaxrec_register(void* memory, uint64_t bytes) {
  cudaError_t error = cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  void* there = nullptr;
  if (error != cudaSuccess) return cudaGetErrorString(error);
  cudaHostGetDevicePointer(&there, memory, 0);
  if (there == memory) return nullptr;
  cudaHostUnregister(memory);
  return "the GPU sees host memory at other addresses";
}

void jaxrec_unregister(void* memory) { cudaHostUnregister(memory); }

// Wait until the reads and puts that programs have begun on a device have ended.
void jaxrec_wait(int device) {
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(device);
  Beside::here().wait();
  cudaSetDevice(before);
}

#else

const char* jaxrec_register(void*, uint64_t) { return nullptr; }
void jaxrec_unregister(void*) {}
void jaxrec_wait(int) { Beside::here().wait(); }

// For tests: as many threads as a launch on a GPU has, in another order for each seed.
void jaxrec_play(int64_t as_threads, uint32_t with_seed) {
  threads = as_threads;
  seed = with_seed;
  drawn = 0;
}

#endif
}
