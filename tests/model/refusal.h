// Expectations about refusals.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <string_view>

#include "ullage/status.h"

namespace ullage::model {

// The code, and every fragment in the message: the offset or the key at fault, and what was found.
template <class T>
void expect_refused(const Result<T>& result, StatusCode code,
                    std::initializer_list<std::string_view> fragments) {
  ASSERT_FALSE(result.ok()) << "accepted, where " << code << " was expected";
  EXPECT_EQ(result.status().code(), code) << result.status().to_string();
  for (const std::string_view fragment : fragments) {
    EXPECT_NE(result.status().message().find(fragment), std::string::npos)
        << "no \"" << fragment << "\" in: " << result.status().to_string();
  }
  EXPECT_LE(result.status().message().size(), 1024u);
}

}  // namespace ullage::model
