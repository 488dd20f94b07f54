// Rows in host memory, read and written by the threads of a device inside of XLA programs.
//
// One source for both: nvcc compiles it for GPUs, whose threads reach registered host memory over the link, and a C++
// compiler for CPUs. What a thread does is the same code; only the launch differs. All threads of a launch write
// different records, so that their order is free.
//
// A record is a row with its slots, padded to 16 bytes, which one thread moves at a time.
//
// Legend: S shards of all devices, S' shards of this device, U padded unique rows per shard, L 16-byte lanes of a record.

#include <cstdint>

#include "xla/ffi/api/ffi.h"

#ifdef __CUDACC__
#include <cuda_runtime.h>
#define ANYWHERE __host__ __device__ inline
#else
#include <algorithm>
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

// The record of unique[s, u] = in[s, u]; puts[s] counts the puts, and makes the next program wait for this one.
struct Put {
  Records records;
  const float4* in;  // [S', U, L]
  const int32_t* before;
  int32_t* after;
  ANYWHERE void operator()(int64_t thread, int64_t threads) const {
    int64_t moves = records.shards_here * records.capacity * records.lanes;
    for (int64_t i = thread; i < moves; i += threads)
      if (float4* to = records.at(i / records.lanes)) to[i % records.lanes] = in[i];
    for (int64_t shard = thread; shard < records.shards_here; shard += threads) after[shard] = before[shard] + 1;
  }
};

#ifdef __CUDACC__

using Stream = ffi::PlatformStream<cudaStream_t>;
using On = cudaStream_t;

template <class Work>
__global__ void run(Work work) {
  work(static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, static_cast<int64_t>(gridDim.x) * blockDim.x);
}

// 32 blocks saturate the link, and leave the multiprocessors to what runs beside.
template <class Work>
ffi::Error launch(cudaStream_t stream, const Work& work) {
  run<<<32, 256, 0, stream>>>(work);
  cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(cudaGetErrorString(error));
}

#else

using Stream = ffi::ThreadPool;
using On = ffi::ThreadPool;
int64_t threads = 1;
uint32_t seed = 0;

// Threads of a GPU run in any order: here they play one after the other, in an order drawn from the seed.
template <class Work>
ffi::Error launch(const ffi::ThreadPool&, const Work& work) {
  std::vector<int64_t> order(threads);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  for (int64_t thread : order) work(thread, threads);
  return ffi::Error::Success();
}

#endif

Records records_of(Integers unique, Integers count, Integers address, int64_t width, int64_t shards, int64_t rows) {
  auto shape = unique.dimensions();
  return {unique.typed_data(), count.typed_data(), address.typed_data(), shape[0], shape[1], width / 4, shards, rows};
}

// `puts` is not read: it makes a program that reads rows wait for the one that has put them.
ffi::Error read_rows(On stream, Integers unique, Integers count, Integers address, Integers puts,
                     ffi::Result<Floats> rows, int64_t shards, int64_t rows_per_shard) {
  Records records = records_of(unique, count, address, rows->dimensions()[2], shards, rows_per_shard);
  return launch(stream, Read{records, reinterpret_cast<float4*>(rows->typed_data())});
}

ffi::Error put_rows(On stream, Integers unique, Integers count, Integers address, Integers puts, Floats rows,
                    ffi::Result<Integers> after, int64_t shards, int64_t rows_per_shard) {
  Records records = records_of(unique, count, address, rows.dimensions()[2], shards, rows_per_shard);
  auto in = reinterpret_cast<const float4*>(rows.typed_data());
  return launch(stream, Put{records, in, puts.typed_data(), after->typed_data()});
}

auto plan_and_puts() {
  return ffi::Ffi::Bind().Ctx<Stream>().Arg<Integers>().Arg<Integers>().Arg<Integers>().Arg<Integers>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrec_read_rows, read_rows,
                              plan_and_puts().Ret<Floats>().Attr<int64_t>("shards").Attr<int64_t>("rows_per_shard"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxrec_put_rows, put_rows,
    plan_and_puts().Arg<Floats>().Ret<Integers>().Attr<int64_t>("shards").Attr<int64_t>("rows_per_shard"));

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

#else

const char* jaxrec_register(void*, uint64_t) { return nullptr; }
void jaxrec_unregister(void*) {}

// For tests: as many threads as a launch on a GPU has, in another order for each seed.
void jaxrec_play(int64_t as_threads, uint32_t with_seed) {
  threads = as_threads;
  seed = with_seed;
}

#endif
}
