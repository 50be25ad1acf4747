// One function for each file of bindings, called by module.cpp.
#pragma once

#include <nanobind/nanobind.h>

namespace octavo {

void bind_memory(nanobind::module_& m);          // ThreadPool, Matrix, KVBlocks, decode
void bind_packed_weights(nanobind::module_& m);  // PackedWeights, checksums
void bind_kernels(nanobind::module_& m);         // StepArrays, the kernels one by one
void bind_step(nanobind::module_& m);            // StepArrays from a plan
void bind_program(nanobind::module_& m);         // Program, LogitRows
void bind_limits(nanobind::module_& m);          // what the machine can do
void bind_sampler(nanobind::module_& m);         // SamplerRow, sample, token_logprobs

}  // namespace octavo
