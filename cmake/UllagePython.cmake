# What a wheel holds beside the Python sources: libullage.so and the shared libraries it needs that a machine without
# its build packages lacks. Included where scikit-build-core builds.
if(ULLAGE_WHEEL_LIBRARY)
  set(ullage_wheel_source ${ULLAGE_WHEEL_LIBRARY})
  add_custom_target(ullage)  # what pyproject.toml names
else()
  set_target_properties(ullage PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN")
  set(ullage_wheel_source $<TARGET_FILE:ullage>)
endif()
set(ullage_wheel_lib ${SKBUILD_PLATLIB_DIR}/ullage/lib)
# One file by one name: a wheel stores a symbolic link as another copy.
install(CODE "file(MAKE_DIRECTORY ${ullage_wheel_lib})
  file(COPY_FILE ${ullage_wheel_source} ${ullage_wheel_lib}/libullage.so)" COMPONENT python)
install(CODE "
  file(GET_RUNTIME_DEPENDENCIES LIBRARIES ${ullage_wheel_source}
    RESOLVED_DEPENDENCIES_VAR found UNRESOLVED_DEPENDENCIES_VAR missing
    PRE_INCLUDE_REGEXES libhwy libfmt libpcre2 PRE_EXCLUDE_REGEXES .)
  foreach(library IN LISTS found)
    get_filename_component(name \${library} NAME)
    file(COPY_FILE \${library} ${ullage_wheel_lib}/\${name})
  endforeach()
  if(missing)
    message(FATAL_ERROR \"not found, and the wheel needs it: \${missing}\")
  endif()"
  COMPONENT python)
