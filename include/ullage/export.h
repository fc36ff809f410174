// Marks what the shared library exports. Everything else is hidden.
#pragma once

#define ULLAGE_API __attribute__((visibility("default")))
