// libtorch's CUDA headers name these types and call nothing of the library, so its half-gigabyte wheel is not needed.
#pragma once
typedef struct cusparseContext *cusparseHandle_t;
enum cusparseStatus_t : int { CUSPARSE_STATUS_SUCCESS = 0 };
extern "C" const char *cusparseGetErrorString(cusparseStatus_t status);
