// The bfloat16 multiply on AMX: 32 rows by 32 columns in four accumulator tiles. Packed activations [block][row][64
// bytes] and weight panels [step][32 columns][2 k] are what the tile unit reads as they are: a block of 16 steps is the
// depth of a tile. One accumulator for each output, in order of k, whatever the number of rows: tiles are always
// multiplied whole, and rows that are not there are computed from whatever follows in memory and thrown away.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "tiles/tile.h"

namespace octavo {

inline constexpr int64_t kAmxRows = 32;

// The tile shapes, for the calling thread, while it lives. Set for each kernel: other code of the process (a BLAS, say)
// may use the same thread's tiles with shapes of its own.
class AmxSession {
 public:
  AmxSession() {
    static const bool permitted = request_permission();
    (void)permitted;
    alignas(64) Configuration shapes{};
    shapes.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.bytes_per_row[tile] = 64;
      shapes.rows[tile] = 16;
    }
    _tile_loadconfig(&shapes);
  }
  ~AmxSession() { _tile_release(); }
  AmxSession(const AmxSession&) = delete;
  AmxSession& operator=(const AmxSession&) = delete;

 private:
  struct Configuration {  // the layout that LDTILECFG reads
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
  };
  // Linux hands out tile state on request, once for the whole process. isa.py has asked before it chose this variant.
  static bool request_permission() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }
};

// out [rows][32] = operands [blocks][rows][16] * panel; `out` has room for kAmxRows rows, and the memory behind the
// operands may be read as far.
inline void amx_multiply(int64_t rows, const PairOperand* operands, const bf16* panel, int64_t num_blocks,
                         Prefetch prefetch, float* out) {
  constexpr int kColumns = static_cast<int>(Matrix::kPanelColumns);
  constexpr int kPanelStride = kColumns * 2 * sizeof(bf16);  // bytes from step to step
  constexpr int kRowBytes = kBlockSteps * sizeof(PairOperand);
  constexpr int64_t kBlockBytes = kBlockSteps * kPanelStride;
  const bool both = rows > 16;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const char* weights = reinterpret_cast<const char*>(panel);
  for (int64_t b = 0; b < num_blocks; ++b, weights += kBlockBytes, operands += rows * kBlockSteps) {
    for (int64_t line = 0; line < kBlockSteps * prefetch.bytes_per_step; line += 64)
      __builtin_prefetch(prefetch.from + b * kBlockSteps * prefetch.bytes_per_step + line, 0, 2);
    _tile_loadd(4, operands, kRowBytes);
    _tile_loadd(6, weights, kPanelStride);
    _tile_loadd(7, weights + 64, kPanelStride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (both) {
      _tile_loadd(5, operands + 16 * kBlockSteps, kRowBytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  constexpr int kOutStride = kColumns * sizeof(float);
  _tile_stored(0, out, kOutStride);
  _tile_stored(1, out + 16, kOutStride);
  if (both) {
    _tile_stored(2, out + 16 * kColumns, kOutStride);
    _tile_stored(3, out + 16 * kColumns + 16, kOutStride);
  }
}

}  // namespace octavo
