// The rows of a product, some hundred at a time: all workers pack the inputs of these together, then each multiplies
// them by its panels. Owns who packs what and when they meet; knows no arithmetic.
#pragma once

#include <algorithm>

#include "octavo/kernels.h"
#include "octavo/memory.h"

namespace octavo {

// What pack_and_multiply wants to know, where nothing else was measured.
inline constexpr int64_t kRowsWorthMeeting = 4;

// Rows that are packed together, in blocks of nearly equal height.
struct RowBlocks {
  int64_t first, rows, num_blocks;

  int64_t begin(int64_t b) const { return rows * b / num_blocks; }  // counted from `first`
  int64_t height(int64_t b) const { return begin(b + 1) - begin(b); }

  // Calls pack(b, r) for each row of this worker's share: row r of block b.
  template <class Pack>
  void share_out(Worker worker, Pack pack) const {
    const auto share = worker.share(rows);
    for (int64_t b = 0; b < num_blocks; ++b)
      for (int64_t r = std::max(share.begin - begin(b), int64_t{0}); r < std::min(share.end - begin(b), height(b)); ++r)
        pack(b, r);
  }
};

// For all of `num_rows` rows, in equal parts of at most `at_once`, in blocks of at most `block_rows`: pack(blocks,
// worker, operands), where `worker` says whose share, then multiply(blocks, operands). `operands`: operand_bytes of
// memory, Team::shared where workers pack together: from `worth_meeting` rows on, since fewer are packed sooner by each
// worker alone.
template <class Pack, class Multiply>
void pack_and_multiply(int64_t num_rows, int64_t at_once, int64_t block_rows, int64_t worth_meeting,
                       size_t operand_bytes, const Team& team, Pack pack, Multiply multiply) {
  struct OwnOperands;
  const int64_t num_parts = divide_up(num_rows, at_once);
  for (int64_t part = 0; part < num_parts; ++part) {
    const int64_t first = num_rows * part / num_parts, rows = num_rows * (part + 1) / num_parts - first;
    const RowBlocks blocks{first, rows, divide_up(rows, block_rows)};
    const bool together = rows >= worth_meeting && team.worker.count > 1;
    void* operands = together ? team.shared : scratch<OwnOperands, char>(operand_bytes);
    pack(blocks, together ? team.worker : Worker{0, 1}, operands);
    if (together) team.pool.barrier();
    multiply(blocks, operands);
    if (first + rows < num_rows && team.worker.count > 1) team.pool.barrier();  // the operands are still being read
  }
}

}  // namespace octavo
