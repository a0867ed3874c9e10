// What a library of kernels exports: functions of C that return an error's message, or null.
#pragma once

#include <exception>
#include <string>

#define QUANTKIT_EXPORT extern "C" __attribute__((visibility("default")))

namespace quantkit {

// Run `work`. The message of what it throws is valid until the thread's next call.
template <typename Work>
const char* guarded(const Work& work) {
  thread_local std::string message;
  try {
    work();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace quantkit
