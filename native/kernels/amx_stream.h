// How the weights of a panel come to AMX tiles: what is fetched while a chunk of it is multiplied.
#pragma once

#include "kernels/panel_kernel.h"
#ifdef __AMX_TILE__
#include "tiles/amx.h"

namespace octavo {

// With every block of steps of a chunk of `depth` that is multiplied by block b of `num_blocks` blocks of rows, here of
// `rows`. One block of rows: the stream, somewhat ahead; several: the next chunk, its lines spread evenly over the
// blocks.
//
// More than a few rows keep the buffers that fill the L1 busy with operands and outputs. So weights are fetched into
// the L2 and no nearer: from there a tile still comes in time.
inline Prefetch plan_amx_prefetch(const void* chunk, int64_t depth, int64_t b, int64_t num_blocks, int64_t rows) {
  constexpr int64_t kBytes = AmxAccumulators::kBlockBytes, kFewRows = 4, kAheadIntoL2 = 8192;
  const char* const bytes = static_cast<const char*>(chunk);
  if (num_blocks > 1) return {bytes + depth * kBytes * (num_blocks + b) / num_blocks, kBytes / num_blocks, true};
  return rows > kFewRows ? Prefetch{bytes + kAheadIntoL2, kBytes, true} : Prefetch{bytes + kWeightsAhead, kBytes};
}

// The packed bytes of groups [begin, end) of panel p.
inline std::span<const uint8_t> packed_groups(const Matrix& weight, int64_t p, int64_t begin, int64_t end) {
  const auto groups = [&](const uint8_t* first, int64_t bytes) {
    return std::span(first + begin * bytes, static_cast<size_t>((end - begin) * bytes));
  };
  if (weight.is_compact()) return groups(weight.panel<uint8_t>(p) + CompactBlock::kTableBytes, CompactBlock::kBytes);
  return with_block_format(weight.block_type(p), [&]<class Format>(Format) {
    return groups(weight.block_panel(p), GroupUnpacker<Format>::Group::kBytes);
  });
}

// The same for several blocks of rows and a chunk that was unpacked from `packed`: the bytes behind those.
inline Prefetch plan_amx_prefetch(std::span<const uint8_t> packed, int64_t depth, int64_t b, int64_t num_blocks) {
  const auto bytes = static_cast<int64_t>(packed.size());
  return {reinterpret_cast<const char*>(packed.data()) + bytes * (num_blocks + b) / num_blocks,
          bytes / (depth * num_blocks), true};
}

}  // namespace octavo

#endif
