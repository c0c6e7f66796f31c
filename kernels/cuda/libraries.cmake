# NVIDIA's libraries beside the toolkit, as imported targets: ktg::cudnn (with the frontend's headers), ktg::nccl,
# ktg::cupti. A target that does not exist stands for a feature that is left out: its library was not found, or its
# option is off. Looked for in the toolkit, the system, KTG_CUDA_HINTS, what launch/setup.sh fetched, and what pip
# installed for python3 (nvidia-cudnn-cu13, nvidia-nccl-cu13, nvidia-cudnn-frontend).
execute_process(
  COMMAND python3 -c "import sysconfig; print(sysconfig.get_paths()['purelib'])"
  OUTPUT_VARIABLE ktg_python_packages OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
set(ktg_hints ${KTG_CUDA_HINTS} ${CUDAToolkit_LIBRARY_ROOT} ${CUDAToolkit_INCLUDE_DIRS}/..)

function(ktg_cuda_library name header python_folder)
  find_path(KTG_${name}_INCLUDE_DIR ${header} HINTS ${ktg_hints} ${ktg_python_packages}/nvidia/${python_folder}
            PATH_SUFFIXES include)
  find_library(KTG_${name}_LIBRARY NAMES ${ARGN} HINTS ${ktg_hints} ${ktg_python_packages}/nvidia/${python_folder}
               PATH_SUFFIXES lib lib64 lib/x86_64-linux-gnu)
  if(NOT KTG_${name}_INCLUDE_DIR OR NOT KTG_${name}_LIBRARY)
    return()
  endif()
  add_library(ktg::${name} INTERFACE IMPORTED GLOBAL)
  target_include_directories(ktg::${name} SYSTEM INTERFACE ${KTG_${name}_INCLUDE_DIR})
  target_link_libraries(ktg::${name} INTERFACE ${KTG_${name}_LIBRARY})
endfunction()

if(KTG_CUDNN)
  ktg_cuda_library(cudnn cudnn.h cudnn cudnn libcudnn.so.9)
endif()
find_path(CUDNN_FRONTEND_INCLUDE_DIR cudnn_frontend.h
          HINTS ${KTG_CUDA_HINTS} ${CMAKE_SOURCE_DIR}/build/third_party/cudnn-frontend ${ktg_python_packages}
                ${ktg_python_packages}/../../../include
          PATH_SUFFIXES include)
if(KTG_NCCL)
  ktg_cuda_library(nccl nccl.h nccl nccl libnccl.so.2)
endif()
if(KTG_CUPTI)
  ktg_cuda_library(cupti cupti.h cuda_cupti cupti libcupti.so.13)
endif()

set(KTG_HAVE_CUDNN OFF)
if(TARGET ktg::cudnn AND CUDNN_FRONTEND_INCLUDE_DIR)
  set(KTG_HAVE_CUDNN ON)
  target_include_directories(ktg::cudnn SYSTEM INTERFACE ${CUDNN_FRONTEND_INCLUDE_DIR})
elseif(KTG_CUDNN)
  message(WARNING "cuDNN or the headers of nvidia-cudnn-frontend were not found (launch/setup.sh brings the headers; "
                  "CUDNN_FRONTEND_INCLUDE_DIR names them). Attention on the GPU is the plain, slower one.")
endif()
if(KTG_NCCL AND NOT TARGET ktg::nccl)
  message(WARNING "NCCL was not found (libnccl-dev, or pip install nvidia-nccl-cu13). One GPU rank only.")
endif()
if(KTG_CUPTI AND NOT TARGET ktg::cupti)
  message(WARNING "CUPTI was not found (it belongs to the CUDA toolkit). Traces show no kernels.")
endif()
# A folder that was configured before still knows where they lie.
foreach(name cudnn nccl cupti)
  set(ktg_${name}_note "left out")
  if(TARGET ktg::${name})
    set(ktg_${name}_note "${KTG_${name}_LIBRARY}")
  endif()
endforeach()
message(STATUS "CUDA ${CUDAToolkit_VERSION} for sm_${CMAKE_CUDA_ARCHITECTURES}; cuDNN ${ktg_cudnn_note}, "
               "NCCL ${ktg_nccl_note}, CUPTI ${ktg_cupti_note}")
