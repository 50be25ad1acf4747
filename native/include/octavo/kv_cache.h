// The paged KV cache. A tile is sixteen tokens: one vector of scores. A block of block_size tokens is block_size / 16
// tiles side by side, so that slot / 16 is the tile of a slot. A tile has all layers in turn, so that as much memory is
// touched as there are blocks in use, however many layers the model has:
//
//   [tile][layer][kv_head]{ keys, values }
//
//   keys    [key_dims / kStep][16][kStep]    key_dims: head_dim in whole blocks of 16 steps
//   values  [16 / kStep][value_dims][kStep]  value_dims: head_dim in whole vectors of 16
//
// A head's keys and values are read one after the other, and a stream over scattered pieces is the faster the longer
// they are.
//
// kStep is 2 in bfloat16 (a pair product takes two dimensions, or two tokens, at once) and 1 in float32. In int8,
// vectors of 16 codes stand where the products will read pairs of them:
//
//   keys    { [key_dims][16], 16 scales }
//   values  { [8][value_dims / 16][2][16], 16 scales }
//
// Whoever owns a block writes its tokens in ascending order. Writing a tile's first token makes zeros of all values of
// the tile that are not written in the same step, so that a probability of zero never meets an earlier owner's NaN.
#pragma once

#include <vector>

#include "octavo/fresh_pages.h"
#include "octavo/memory.h"
#include "octavo/types.h"

namespace octavo {

struct KVShape {
  int64_t num_blocks, block_size, num_kv_heads, head_dim;
  DType dtype;
};

class KVBlocks;

// One layer of it: where its keys and values stand.
class KVCache {
 public:
  static constexpr int64_t kTileTokens = 16;

  // `first`: the layer's part of the first tile, tile_stride bytes before that of the second; nothing may be read where
  // it is null. Throws std::invalid_argument for a type that no cache keeps.
  KVCache(const KVShape& shape, char* first, int64_t tile_stride, KVBlocks* blocks = nullptr);

  KVBlocks* blocks() const { return blocks_; }  // whose layer it is

  DType dtype() const { return shape_.dtype; }
  int64_t num_kv_heads() const { return shape_.num_kv_heads; }
  int64_t head_dim() const { return shape_.head_dim; }
  int64_t block_size() const { return shape_.block_size; }
  int64_t key_dims() const { return round_up(head_dim(), dtype() == DType::kFloat32 ? 16 : 32); }
  int64_t value_dims() const { return round_up(head_dim(), 16); }
  // Of one tile of one head, with its scales.
  int64_t key_tile_bytes() const { return key_tile_; }
  int64_t value_tile_bytes() const { return value_tile_; }
  // Of one tile of all heads, keys and values.
  int64_t tile_bytes() const { return num_kv_heads() * (key_tile_ + value_tile_); }

  // T: float, bf16 or int8_t, as dtype() says.
  template <class T>
  T* keys(int64_t tile, int64_t head) const {
    return reinterpret_cast<T*>(first_ + tile * tile_stride_ + head * (key_tile_ + value_tile_));
  }
  template <class T>
  T* values(int64_t tile, int64_t head) const {
    return reinterpret_cast<T*>(keys<char>(tile, head) + key_tile_);
  }
  // In int8: a code times the scale of its token is the value. [16]
  float* key_scales(int64_t tile, int64_t head) const {
    return reinterpret_cast<float*>(keys<int8_t>(tile, head) + key_dims() * kTileTokens);
  }
  float* value_scales(int64_t tile, int64_t head) const {
    return reinterpret_cast<float*>(values<int8_t>(tile, head) + value_dims() * kTileTokens);
  }

 private:
  KVShape shape_;
  char* first_;
  int64_t tile_stride_, key_tile_, value_tile_;  // bytes
  KVBlocks* blocks_;
};

// All layers: owns the memory.
class KVBlocks {
 public:
  KVBlocks(const KVShape& shape, int64_t num_layers);
  KVBlocks(const KVBlocks&) = delete;
  KVBlocks& operator=(const KVBlocks&) = delete;

  const std::vector<KVCache>& layers() const { return layers_; }
  int64_t num_blocks() const { return shape_.num_blocks; }
  int64_t block_size() const { return shape_.block_size; }
  int64_t block_bytes() const { return block_bytes_; }

  // Before tokens are written to `slots` [count]: makes the memory that none was written to yet.
  void make_room(ThreadPool& pool, const int32_t* slots, int64_t count);
  // The first num_tokens tokens of a block into another one, or into the same; values behind them become zero.
  void copy_block(int64_t from, int64_t to, int64_t num_tokens) const;
  // A block's block_bytes() bytes, as they lie.
  char* block(int64_t block) const { return memory_.as<char>() + block * block_bytes_; }

 private:
  KVShape shape_;
  int64_t block_bytes_;
  Memory memory_;
  FreshPages fresh_;
  std::vector<KVCache> layers_;
};

}  // namespace octavo
