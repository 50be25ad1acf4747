// Writes rows of keys and values into the tiles of the paged cache, and copies blocks. Owns the layouts that kv_cache.h
// describes.
#include "octavo/kv_cache.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "octavo/attention.h"
#include "tiles/vec.h"

namespace octavo {

constexpr int64_t kTileTokens = KVCache::kTileTokens;

KVCache::KVCache(const KVShape& shape, char* first, int64_t tile_stride, KVBlocks* blocks)
    : shape_(shape), first_(first), tile_stride_(tile_stride), blocks_(blocks) {
  if (dtype() == DType::kInt16) throw std::invalid_argument("a cache keeps float32, bfloat16 or int8");
  const int64_t element = dtype() == DType::kFloat32 ? 4 : dtype() == DType::kBFloat16 ? 2 : 1;
  const int64_t scales = dtype() == DType::kInt8 ? kTileTokens * sizeof(float) : 0;
  key_tile_ = key_dims() * kTileTokens * element + scales;
  value_tile_ = value_dims() * kTileTokens * element + scales;
}

KVBlocks::KVBlocks(const KVShape& shape, int64_t num_layers) : shape_(shape) {
  const int64_t layer_bytes = KVCache(shape, nullptr, 0).tile_bytes(), tile_stride = num_layers * layer_bytes;
  block_bytes_ = shape.block_size / kTileTokens * tile_stride;
  memory_ = Memory(static_cast<size_t>(shape.num_blocks * block_bytes_));
  fresh_ = FreshPages(memory_);
  for (int64_t i = 0; i < num_layers; ++i) layers_.emplace_back(shape, block(0) + i * layer_bytes, tile_stride, this);
}

void KVBlocks::make_room(ThreadPool& pool, const int32_t* slots, int64_t count) {
  const int32_t last_slot = count > 0 ? *std::max_element(slots, slots + count) : 0;
  fresh_.make(pool, block(last_slot / block_size() + 1));
}

namespace {

// The rows of one write, and which of them share tiles.
struct Rows {
  View k, v;
  const int32_t* slots;

  int64_t token(int64_t t) const { return slots[t] % kTileTokens; }
  // Whether row t + 1 is the next token of the same tile.
  bool continues(int64_t t) const {
    return token(t) != kTileTokens - 1 && t + 1 < k.rows && slots[t + 1] == slots[t] + 1;
  }
  // Whether row t is the last that is written of a tile whose first token is written too: the rest is to be cleared.
  bool ends_new_tile(int64_t t) const {
    const int64_t first = t - token(t);
    return !continues(t) && first >= 0 && slots[first] == slots[t] - token(t);
  }
};

int vector_length(int64_t dim, int64_t d) { return static_cast<int>(std::min<int64_t>(16, dim - d)); }

// One row of one head into the tiles, in each type. `token`: within the tile.
template <class T>
struct RowWriter;

template <>
struct RowWriter<float> {
  const KVCache& cache;
  int64_t dim = cache.head_dim();

  void write_key(const float* key, int64_t tile, int64_t head, int64_t token) const {
    float* to = cache.keys<float>(tile, head) + token;
    for (int64_t d = 0; d < dim; ++d) to[d * kTileTokens] = key[d];
  }
  void write_value(const float* value, int64_t tile, int64_t head, int64_t token) const {
    std::memcpy(cache.values<float>(tile, head) + token * cache.value_dims(), value, dim * sizeof(float));
  }
  void clear_values(int64_t tile, int64_t head, int64_t first_token) const {
    float* values = cache.values<float>(tile, head);
    std::fill(values + first_token * cache.value_dims(), values + kTileTokens * cache.value_dims(), 0.0f);
  }
};

template <>
struct RowWriter<bf16> {
  const KVCache& cache;
  int64_t dim = cache.head_dim();

  void write_key(const float* key, int64_t tile, int64_t head, int64_t token) const {
    auto* to = reinterpret_cast<uint32_t*>(cache.keys<bf16>(tile, head)) + token;
    for (int64_t d = 0; d < dim; d += 16) {
      uint32_t pairs[8];
      Vec::load(key + d, vector_length(dim, d)).store(reinterpret_cast<bf16*>(pairs));
      for (int64_t i = 0; i < 8; ++i) to[(d / 2 + i) * kTileTokens] = pairs[i];
    }
  }
  // A value shares its words with its neighbour's, which another worker may be writing: store halves only.
  void write_value(const float* value, int64_t tile, int64_t head, int64_t token) const {
    bf16* to = cache.values<bf16>(tile, head) + token / 2 * cache.value_dims() * 2 + token % 2;
    for (int64_t d = 0; d < dim; d += 16) {
      bf16 rounded[16];
      Vec::load(value + d, vector_length(dim, d)).store(rounded);
      for (int64_t i = 0; i < 16; ++i) to[(d + i) * 2] = rounded[i];
    }
  }
  // Tokens `token` (even) and the next.
  void write_value_pair(const float* even, const float* odd, int64_t tile, int64_t head, int64_t token) const {
    bf16* to = cache.values<bf16>(tile, head) + token * cache.value_dims();
    for (int64_t d = 0; d < dim; d += 16) {
      const int n = vector_length(dim, d);
      store_interleaved(to + d * 2, Vec::load(even + d, n), Vec::load(odd + d, n));
    }
  }
  void clear_values(int64_t tile, int64_t head, int64_t first_token) const {
    bf16* values = cache.values<bf16>(tile, head);
    if (first_token % 2 == 1)
      for (int64_t d = 0; d < cache.value_dims(); ++d) values[(first_token / 2 * cache.value_dims() + d) * 2 + 1] = {0};
    bf16* const rest = values + round_up(first_token, 2) * cache.value_dims();
    std::memset(rest, 0, (values + kTileTokens * cache.value_dims() - rest) * sizeof(bf16));
  }
};

// Codes [16] of the vectors of a row in turn, f(d, codes) for each; returns their scale: the largest magnitude over
// 127.
template <class F>
float quantise(const float* x, int64_t dim, F f) {
  Vec highest = Vec::zero();
  for (int64_t d = 0; d < dim; d += 16) highest = max(highest, abs(Vec::load(x + d, vector_length(dim, d))));
  const float scale = largest(highest) / 127.0f;
  const Vec divisor = Vec::set1(scale > 0 ? scale : 1.0f);
  for (int64_t d = 0; d < dim; d += 16) {
    int8_t codes[16];
    (Vec::load(x + d, vector_length(dim, d)) / divisor).store_int8(codes);
    f(d, codes);
  }
  return scale;
}

template <>
struct RowWriter<int8_t> {
  const KVCache& cache;

  void write_key(const float* key, int64_t tile, int64_t head, int64_t token) const {
    int8_t* to = cache.keys<int8_t>(tile, head) + token;
    cache.key_scales(tile, head)[token] = quantise(key, cache.head_dim(), [&](int64_t d, const int8_t* codes) {
      for (int64_t i = 0; i < 16; ++i) to[(d + i) * kTileTokens] = codes[i];
    });
  }
  void write_value(const float* value, int64_t tile, int64_t head, int64_t token) const {
    int8_t* to = cache.values<int8_t>(tile, head) + token / 2 * cache.value_dims() * 2 + token % 2 * 16;
    cache.value_scales(tile, head)[token] =
        quantise(value, cache.head_dim(), [&](int64_t d, const int8_t* codes) { std::memcpy(to + d * 2, codes, 16); });
  }
  // What an earlier owner left is finite: its scales are never read.
  void clear_values(int64_t, int64_t, int64_t) const {}
};

template <class T>
void clear_values_of_all_heads(const KVCache& cache, int64_t tile, int64_t first_token) {
  for (int64_t head = 0; head < cache.num_kv_heads(); ++head) RowWriter<T>{cache}.clear_values(tile, head, first_token);
}

template <class T>
void write_rows(const Rows& rows, const KVCache& cache, Worker::Range mine) {
  const RowWriter<T> writer{cache};
  const int64_t dim = cache.head_dim();
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const int64_t tile = rows.slots[t] / kTileTokens, token = rows.token(t);
    for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
      const float* value = rows.v.row(t) + head * dim;
      writer.write_key(rows.k.row(t) + head * dim, tile, head, token);
      if constexpr (std::is_same_v<T, bf16>) {
        const bool second = token % 2 == 1 && t > mine.begin && rows.continues(t - 1);
        if (second)
          writer.write_value_pair(rows.v.row(t - 1) + head * dim, value, tile, head, token - 1);
        else if (t + 1 == mine.end || token % 2 == 1 || !rows.continues(t))
          writer.write_value(value, tile, head, token);
      } else {
        writer.write_value(value, tile, head, token);
      }
      if (rows.ends_new_tile(t)) writer.clear_values(tile, head, token + 1);
    }
  }
}

}  // namespace

void KVBlocks::copy_block(int64_t from, int64_t to, int64_t num_tokens) const {
  const int64_t tiles_of_block = block_size() / kTileTokens, num_tiles = divide_up(num_tokens, kTileTokens);
  if (from != to) std::memcpy(block(to), block(from), num_tiles * (block_bytes_ / tiles_of_block));
  const int64_t last_tile = to * tiles_of_block + num_tiles - 1;
  const int64_t num_kept = num_tokens - (num_tiles - 1) * kTileTokens;
  if (num_kept == kTileTokens) return;
  for (const KVCache& layer : layers_) {
    switch (layer.dtype()) {
      case DType::kFloat32:
        clear_values_of_all_heads<float>(layer, last_tile, num_kept);
        break;
      case DType::kBFloat16:
        clear_values_of_all_heads<bf16>(layer, last_tile, num_kept);
        break;
      case DType::kInt8:
        clear_values_of_all_heads<int8_t>(layer, last_tile, num_kept);
        break;
      case DType::kInt16:
        break;  // KVCache refuses it
    }
  }
}

void write_kv(View k, View v, const int32_t* slot_mapping, const KVCache& cache, Worker::Range mine) {
  const Rows rows{k, v, slot_mapping};
  switch (cache.dtype()) {
    case DType::kFloat32:
      return write_rows<float>(rows, cache, mine);
    case DType::kBFloat16:
      return write_rows<bf16>(rows, cache, mine);
    case DType::kInt8:
      return write_rows<int8_t>(rows, cache, mine);
    case DType::kInt16:
      return;  // KVCache refuses it
  }
}

}  // namespace octavo
