// The Python module. Kernels know nothing of Python; what binds them is in this folder.
#include "bindings/bindings.h"

NB_MODULE(OCTAVO_MODULE, m) {
  // An engine that lives until the interpreter ends is no leak.
  nanobind::set_leak_warnings(false);
  octavo::bind_packed_weights(m);
  octavo::bind_memory(m);
  octavo::bind_kernels(m);
  octavo::bind_step(m);
  octavo::bind_program(m);
  octavo::bind_limits(m);
  octavo::bind_sampler(m);
}
