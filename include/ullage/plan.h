// What a plan says of memory and of the choices behind it. The same for every operation of the
// library.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ullage {

// Memory booked under the name of what it is for.
struct Booking {
  std::string purpose;
  int64_t bytes = 0;
};

// A candidate that was passed over, and the one reason.
struct Rejection {
  std::string candidate;
  std::string reason;
};

}  // namespace ullage
