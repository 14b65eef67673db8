// libtorch's CUDA headers name these types and call nothing of the library, so its half-gigabyte wheel is not needed.
#pragma once
typedef struct cublasContext *cublasHandle_t;
enum cublasStatus_t : int { CUBLAS_STATUS_SUCCESS = 0 };
