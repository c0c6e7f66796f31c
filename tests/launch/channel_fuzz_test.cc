// Messages of strangers: any bytes, any descriptors. What is no message of ours is an error, and its descriptors are
// closed.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>

#include "launch/agent_messages.h"
#include "launch/channel.h"
#include "tests/mutation.h"

namespace kintsugi::launch {
namespace {

size_t open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

// One packet with copies of standard error beside it.
void send_raw(int fd, std::string bytes, size_t num_fds) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(16 * sizeof(int))> control{};
  iovec part{bytes.data(), bytes.size()};
  msghdr m{};
  m.msg_iov = &part;
  m.msg_iovlen = 1;
  if (num_fds > 0) {
    m.msg_control = control.data();
    m.msg_controllen = CMSG_SPACE(num_fds * sizeof(int));
    cmsghdr* c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(num_fds * sizeof(int));
    std::array<int, 16> fds;
    fds.fill(STDERR_FILENO);
    std::memcpy(CMSG_DATA(c), fds.data(), num_fds * sizeof(int));
  }
  ASSERT_GE(::sendmsg(fd, &m, MSG_NOSIGNAL), 0);
}

TEST(ChannelFuzzTest, AnyPacketIsAMessageOrAnErrorAndNoDescriptorIsLost) {
  auto random = mutation::make_random();
  auto [reader, writer] = Channel::create_pair().value();
  const size_t before = open_descriptors();
  int received = 0, refused = 0;
  for (int round = mutation::rounds(3000); round > 0; --round) {
    std::string bytes(1 + random() % (random() % 4 == 0 ? 3000 : 100), '\0');
    for (char& c : bytes) c = static_cast<char>(random() % 3 == 0 ? random() : 0);
    send_raw(writer.fd(), bytes, random() % 8);
    const auto message = reader.try_receive();
    if (!message.ok()) {
      ++refused;
      continue;
    }
    ASSERT_TRUE(message->has_value());
    ++received;
    EXPECT_LE((*message)->body.size(), bytes.size());
  }
  EXPECT_GT(received, 0);
  EXPECT_GT(refused, 0);
  EXPECT_EQ(open_descriptors(), before);
}

TEST(HelloTest, ABodyThatIsTooShortOrHasNoEndOfTextIsNone) {
  Hello hello;
  std::strcpy(hello.token, "token");
  hello.world_size = 3;
  std::string_view rest;
  const std::string body = pack(hello) + "why not";
  const std::optional<Hello> read = read_hello(body, &rest);
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->world_size, 3);
  EXPECT_EQ(std::string_view(read->token), "token");
  EXPECT_EQ(rest, "why not");
  for (size_t size = 0; size < sizeof(Hello); ++size) EXPECT_FALSE(read_hello(body.substr(0, size), &rest));
  std::memset(hello.token, 'x', sizeof hello.token);
  EXPECT_FALSE(read_hello(pack(hello), &rest));
}

}  // namespace
}  // namespace kintsugi::launch
