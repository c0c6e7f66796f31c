// What most tests include, in precompiled form (KTG_UNITY). A test still names all headers that it uses. Headers that
// take part in few tests, or whose macros depend on a target's options, cost more here than they save.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>
