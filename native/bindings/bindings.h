// One function for each file of bindings, called by module.cpp.
#pragma once

#include <nanobind/nanobind.h>
