// The rows of a product, some hundred at a time: all workers pack the inputs of these together, then each multiplies
// them by its panels. Owns who packs what and when they meet; knows no arithmetic.
#pragma once

#include <algorithm>

#include "octavo/kernels.h"
#include "octavo/memory.h"

namespace octavo {

// What pack_and_multiply wants to know, where nothing else was measured.
inline constexpr int64_t kRowsWorthMeeting = 4;

// Rows that are multiplied together, in blocks of one height; the last may be lower.
struct RowBlocks {
  int64_t first, rows, block_rows;
  int64_t num_blocks = divide_up(rows, block_rows);

  int64_t begin(int64_t b) const { return b * block_rows; }  // counted from `first`
  int64_t height(int64_t b) const { return std::min(block_rows, rows - begin(b)); }

  // Calls pack(b, r) for each row of this worker's share: row r of block b.
  template <class Pack>
  void share_out(Worker worker, Pack pack) const {
    const auto share = worker.share(rows);
    for (int64_t b = 0; b < num_blocks; ++b)
      for (int64_t r = std::max(share.begin - begin(b), int64_t{0}); r < std::min(share.end - begin(b), height(b)); ++r)
        pack(b, r);
  }
};

// The height of the blocks of `num_rows` rows: at most `max_block_rows`, whatever the product.
inline int64_t block_height(int64_t num_rows, int64_t max_block_rows) {
  const int64_t rows = std::max<int64_t>(num_rows, 1);
  return divide_up(rows, divide_up(rows, max_block_rows));
}

// Calls f(blocks) for all of `num_rows` rows, in parts of at most `at_once` and of nearly equal numbers of blocks.
template <class F>
void for_each_part(int64_t num_rows, int64_t at_once, int64_t max_block_rows, F f) {
  const int64_t height = block_height(num_rows, max_block_rows), num_blocks = divide_up(num_rows, height);
  const int64_t num_parts = divide_up(num_blocks, at_once / max_block_rows);
  for (int64_t part = 0; part < num_parts; ++part) {
    const int64_t first = num_blocks * part / num_parts * height,
                  end = std::min(num_blocks * (part + 1) / num_parts * height, num_rows);
    f(RowBlocks{first, end - first, height});
  }
}

// For each part of `num_rows` rows: pack(blocks, worker, operands), where `worker` says whose share, then
// multiply(blocks, operands). `operands`: operand_bytes of memory, Team::shared where workers pack together: from
// `worth_meeting` rows on, since fewer are packed sooner by each worker alone.
template <class Pack, class Multiply>
void pack_and_multiply(int64_t num_rows, int64_t at_once, int64_t max_block_rows, int64_t worth_meeting,
                       size_t operand_bytes, const Team& team, Pack pack, Multiply multiply) {
  struct OwnOperands;
  for_each_part(num_rows, at_once, max_block_rows, [&](const RowBlocks& blocks) {
    const bool together = blocks.rows >= worth_meeting && team.worker.count > 1;
    void* operands = together ? team.shared : scratch<OwnOperands, char>(operand_bytes);
    pack(blocks, together ? team.worker : Worker{0, 1}, operands);
    if (together) team.pool.barrier();
    multiply(blocks, operands);
    if (blocks.first + blocks.rows < num_rows && team.worker.count > 1) team.pool.barrier();  // they are still read
  });
}

}  // namespace octavo
