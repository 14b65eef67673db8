// libtorch's CUDA headers name these types and call nothing of the library, so its half-gigabyte wheel is not needed.
#pragma once
#include <cusolver_common.h>
typedef struct cusolverDnContext *cusolverDnHandle_t;
