# find_package(ullage CONFIG) and pkg-config, over the C ABI and the public headers.
include(CMakePackageConfigHelpers)
install(TARGETS ullage ullage_headers EXPORT ullageTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/ullage DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT ullageTargets NAMESPACE ullage:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/ullage)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/ullage-config.cmake.in
  ${PROJECT_BINARY_DIR}/ullage-config.cmake INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/ullage)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/ullage-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/ullage-config.cmake ${PROJECT_BINARY_DIR}/ullage-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/ullage)
file(RELATIVE_PATH ULLAGE_PC_TO_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(${PROJECT_SOURCE_DIR}/cmake/ullage.pc.in ${PROJECT_BINARY_DIR}/ullage.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/ullage.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
if(ULLAGE_BUILD_APPS)
  install(TARGETS ullage_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
