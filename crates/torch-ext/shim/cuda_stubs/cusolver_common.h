// libtorch's CUDA headers name these types and call nothing of the library, so its half-gigabyte wheel is not needed.
#pragma once
enum cusolverStatus_t : int { CUSOLVER_STATUS_SUCCESS = 0, CUSOLVER_STATUS_EXECUTION_FAILED = 6, CUSOLVER_STATUS_INVALID_VALUE = 3 };
