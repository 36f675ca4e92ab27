/* The five checks that DietGPU uses of glog, so that it can be built without glog.
 * What stays true: a check that fails prints its place and aborts.
 */
#pragma once
#include <cassert> /* DietGPU expects it from here */
#include <cstdlib>
#include <iostream>

namespace bench_glog {

/* Takes the message that follows a failed check; the process ends with the statement. */
struct Failure {
  Failure(const char *file, int line, const char *condition) {
    std::cerr << file << ':' << line << ": check failed: " << condition << ' ';
  }
  ~Failure() {
    std::cerr << std::endl;
    std::abort();
  }
  template <class T>
  Failure &operator<<(const T &value) {
    std::cerr << value;
    return *this;
  }
};

/* Makes both branches of a check's `?:` void; it binds less tightly than `<<`. */
struct Ignore {
  void operator&(const Failure &) {}
};

}  // namespace bench_glog

#define CHECK(condition) \
  (condition) ? (void)0 : bench_glog::Ignore() & bench_glog::Failure(__FILE__, __LINE__, #condition)
#define CHECK_EQ(a, b) CHECK((a) == (b))
#define CHECK_NE(a, b) CHECK((a) != (b))
#define CHECK_GE(a, b) CHECK((a) >= (b))
#define CHECK_LE(a, b) CHECK((a) <= (b))
