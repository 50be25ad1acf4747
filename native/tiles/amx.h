// The multiply on AMX: 32 rows by 32 columns in four accumulator tiles. Packed activations [block][row][64 bytes] and
// weight panels [step][32 columns][4 bytes of k] are what the tile unit reads as they are: a block of 16 steps is the
// depth of a tile. One accumulator for each output, in order of k, whatever the number of rows. Tiles have the rows of
// the highest block (AmxShapes); what a lower one lacks is computed from whatever follows in memory and thrown away.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "tiles/tile.h"

namespace octavo {

inline constexpr int64_t kAmxRows = 32;

// The layout that LDTILECFG reads.
struct alignas(64) AmxShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, uint8_t num_rows, uint16_t num_bytes) {
    rows[tile] = num_rows;
    bytes_per_row[tile] = num_bytes;
  }
  // For AmxAccumulators with blocks of up to `block_rows` rows: no more is loaded, multiplied and stored.
  static AmxShapes accumulators(int64_t block_rows) {
    AmxShapes shapes = full();
    const auto low = static_cast<uint8_t>(block_rows < 16 ? block_rows : 16);
    const auto high = static_cast<uint8_t>(block_rows > 16 ? block_rows - 16 : 1);
    for (const int tile : {0, 1, 4}) shapes.set(tile, low, 64);
    for (const int tile : {2, 3, 5}) shapes.set(tile, high, 64);
    return shapes;
  }
  // Eight whole tiles.
  static AmxShapes full() {
    AmxShapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.set(tile, 16, 64);
    return shapes;
  }
};

// The tile shapes, for the calling thread, while it lives. Set for each kernel: other code of the process (a BLAS, say)
// may use the same thread's tiles with shapes of its own.
class AmxSession {
 public:
  explicit AmxSession(const AmxShapes& shapes = AmxShapes::full()) {
    static const bool permitted = request_permission();
    (void)permitted;
    _tile_loadconfig(&shapes);
  }
  ~AmxSession() { _tile_release(); }
  AmxSession(const AmxSession&) = delete;
  AmxSession& operator=(const AmxSession&) = delete;

 private:
  // Linux hands out tile state on request, once for the whole process. isa.py has asked before it chose this variant.
  static bool request_permission() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }
};

// The four accumulator tiles, 32 rows by 32 columns. They keep their values from call to call.
struct AmxAccumulators {
  static constexpr int kStepBytes = Matrix::kPanelColumns * 4;  // of a panel
  static constexpr int64_t kBlockBytes = kBlockSteps * kStepBytes;
  static constexpr int kOutStride = Matrix::kPanelColumns * 4;

  static void zero() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  // From and to [32][32] sums, of four bytes; rows beyond the 16th only where there are `rows` of them.
  template <class Sum>
  static void load(int64_t rows, const Sum* tile) {
    asm volatile("" ::: "memory");  // tile loads do not say that they read memory
    _tile_loadd(0, tile, kOutStride);
    _tile_loadd(1, tile + 16, kOutStride);
    if (rows <= 16) return;
    _tile_loadd(2, tile + 16 * Matrix::kPanelColumns, kOutStride);
    _tile_loadd(3, tile + 16 * Matrix::kPanelColumns + 16, kOutStride);
  }
  template <class Sum>
  static void store(int64_t rows, Sum* tile) {
    _tile_stored(0, tile, kOutStride);
    _tile_stored(1, tile + 16, kOutStride);
    if (rows <= 16) return;
    _tile_stored(2, tile + 16 * Matrix::kPanelColumns, kOutStride);
    _tile_stored(3, tile + 16 * Matrix::kPanelColumns + 16, kOutStride);
  }
  // A block of weights: tiles 6 and 7. `once`: nobody reads it again, so that it need not take the place of operands in
  // the L1.
  static void load_left(const void* block, bool once) {
    if (once)
      _tile_stream_loadd(6, block, kStepBytes);
    else
      _tile_loadd(6, block, kStepBytes);
  }
  static void load_right(const void* block, bool once) {
    const char* right = static_cast<const char*>(block) + 64;
    if (once)
      _tile_stream_loadd(7, right, kStepBytes);
    else
      _tile_loadd(7, right, kStepBytes);
  }
  // += operands [blocks][rows][16 steps] * weights [blocks][16 steps][32 columns], both of bf16 or both of int8. The
  // memory behind the operands may be read as far as 32 rows would reach. `once`: the weights are for these rows only.
  template <class Operand, class Weight>
  static void add(int64_t rows, const Operand* operands, const Weight* weights, int64_t num_blocks, Prefetch prefetch,
                  bool once) {
    constexpr bool kBytes = std::is_same_v<Weight, int8_t>;
    constexpr int kRowBytes = kBlockSteps * sizeof(Operand);
    static_assert(kRowBytes == 64);
    asm volatile("" ::: "memory");
    const char* at = reinterpret_cast<const char*>(weights);
    for (int64_t b = 0; b < num_blocks; ++b, at += kBlockBytes, operands += rows * kBlockSteps) {
      prefetch.quarter(b, 0);
      load_left(at, once);
      load_right(at, once);
      prefetch.quarter(b, 1);
      _tile_loadd(4, operands, kRowBytes);
      prefetch.quarter(b, 2);
      if constexpr (kBytes) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
      } else {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
      }
      prefetch.quarter(b, 3);
      if (rows <= 16) continue;
      _tile_loadd(5, operands + 16 * kBlockSteps, kRowBytes);
      if constexpr (kBytes) {
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
      } else {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
};

}  // namespace octavo
