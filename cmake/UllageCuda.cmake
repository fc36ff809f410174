# The CUDA language, its architectures and its flags.
if(NOT CMAKE_CUDA_COMPILER)
  find_program(CMAKE_CUDA_COMPILER nvcc HINTS ENV CUDA_PATH PATHS /usr/local/cuda/bin)
endif()
# Hopper's own instructions need 90a; everything newer than Ampere runs the PTX of 80.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES "80;90a-real")
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)

set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
# CMake 3.25 does not know that nvcc 13 takes C++20.
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()

# -fmad=false: a fused multiply-add appears only where the code writes one, so that kernels that
# share a formula share its bits.
set(ULLAGE_CUDA_FLAGS -fmad=false --Werror=all-warnings)
