// libtorch's CUDA headers name these types and call nothing of the library, so its half-gigabyte wheel is not needed.
#pragma once
typedef struct cublasLtContext *cublasLtHandle_t;
