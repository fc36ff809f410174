# ullage_floor(NAME SOURCES file... [FLOORS floor...] [LIBS target...])
# One floor of the house: a static library ullage_NAME that may use the floors above it and nothing else.
# LIBS are third-party and stay private to the floor's .cc files.
function(ullage_floor name)
  cmake_parse_arguments(ARG "" "" "SOURCES;FLOORS;LIBS" ${ARGN})
  add_library(ullage_${name} STATIC ${ARG_SOURCES})
  list(TRANSFORM ARG_FLOORS PREPEND ullage_)
  target_link_libraries(ullage_${name} PUBLIC ullage_headers ${ARG_FLOORS} PRIVATE ${ARG_LIBS})
  target_link_libraries(ullage_${name} PRIVATE ullage_warnings)
  target_include_directories(ullage_${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>)
  set_property(GLOBAL APPEND PROPERTY ULLAGE_FLOORS ullage_${name})
endfunction()

# ullage_test(NAME SOURCES file... FLOORS floor... [LIBS target...] [LABELS label...])
# A GoogleTest program. It finds its data under ULLAGE_TEST_DATA, and the larger golden files, where the
# checkout has them beside it, under ULLAGE_GOLDEN.
function(ullage_test name)
  cmake_parse_arguments(ARG "" "" "SOURCES;FLOORS;LIBS;LABELS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  list(TRANSFORM ARG_FLOORS PREPEND ullage_)
  target_link_libraries(${name} PRIVATE ${ARG_FLOORS} ${ARG_LIBS} ullage_warnings GTest::gtest GTest::gtest_main)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_compile_definitions(${name} PRIVATE
    ULLAGE_TEST_DATA="${PROJECT_SOURCE_DIR}/tests/data"
    ULLAGE_GOLDEN="${PROJECT_SOURCE_DIR}/../shared/golden")
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT 600 LABELS "${ARG_LABELS}")
endfunction()

# What a user's include path holds.
add_library(ullage_headers INTERFACE)
target_include_directories(ullage_headers INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)

# -ffp-contract=off: a fused multiply-add appears only where the code writes one, so that results do not
# depend on what the compiler found to contract.
# -Wno-restrict: at -O3, GCC 12 sees overlaps in std::string's operator+ (GCC bug 105329).
add_library(ullage_warnings INTERFACE)
target_compile_options(ullage_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Werror -Wshadow -Wconversion -Wno-sign-conversion -ffp-contract=off>
  $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>
  $<$<COMPILE_LANGUAGE:C>:-Wall -Wextra -Werror>)
