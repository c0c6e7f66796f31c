#include "comm/store/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <thread>

#include "comm/store/socket.h"
#include "comm/store/store_table.h"
#include "comm/store/wire.h"
#include "tests/mutation.h"

namespace kintsugi::comm {
namespace {

using std::chrono::milliseconds;

Deadline soon() { return Deadline::after(std::chrono::seconds(20)); }

// One store and, where it has one, its server.
struct Fixture {
  std::unique_ptr<StoreServer> server;
  std::unique_ptr<Store> base;
  std::unique_ptr<Store> store;
};

Fixture make_fixture(const std::string& kind) {
  Fixture f;
  if (kind == "local") {
    f.store = create_local_store();
    return f;
  }
  f.server = std::move(StoreServer::start("127.0.0.1", 0)).value();
  f.store = std::move(connect_store("127.0.0.1", f.server->port(), soon())).value();
  if (kind == "prefix") {
    f.base = std::move(f.store);
    f.store = create_prefix_store(*f.base, "gen/7");
  }
  return f;
}

class StoreTest : public testing::TestWithParam<std::string> {
 protected:
  Fixture fixture_ = make_fixture(GetParam());
  Store& store_ = *fixture_.store;
};

TEST_P(StoreTest, WhatIsSetIsRead) {
  const std::string bytes("a\0b\xff", 4);
  EXPECT_TRUE(store_.set("k", bytes, soon()).ok());
  EXPECT_EQ(store_.get("k", soon()).value(), bytes);
  EXPECT_TRUE(store_.set("k", "", soon()).ok());
  EXPECT_EQ(store_.get("k", soon()).value(), "");
}

TEST_P(StoreTest, GetWaitsForTheKey) {
  std::thread setter([&] { EXPECT_TRUE(store_.set("late", "here", soon()).ok()); });
  EXPECT_EQ(store_.get("late", soon()).value(), "here");
  setter.join();
}

TEST_P(StoreTest, AGetThatWaitsHoldsUpNobody) {
  std::thread getter([&] { EXPECT_EQ(store_.get("b", soon()).value(), "2"); });
  EXPECT_TRUE(store_.set("a", "1", soon()).ok());
  EXPECT_EQ(store_.get("a", soon()).value(), "1");
  EXPECT_TRUE(store_.set("b", "2", soon()).ok());
  getter.join();
}

TEST_P(StoreTest, GetOfAMissingKeyEndsAtItsDeadline) {
  const TimePoint began = MonotonicClock::now();
  const auto got = store_.get("never", Deadline::after(milliseconds(30)));
  EXPECT_EQ(got.status().code(), StatusCode::kDeadlineExceeded) << got.status().to_string();
  EXPECT_GE(MonotonicClock::now() - began, milliseconds(30));
  EXPECT_TRUE(store_.set("after", "1", soon()).ok());  // the store is as good as before
}

TEST_P(StoreTest, CountersAddUpOverThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) EXPECT_TRUE(store_.add("n", 3, soon()).ok());
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(store_.add("n", -600, soon()).value(), 0);
  EXPECT_EQ(store_.get("n", soon()).value(), "0");
  EXPECT_TRUE(store_.set("text", "x", soon()).ok());
  EXPECT_EQ(store_.add("text", 1, soon()).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(store_.set("big", "9223372036854775807", soon()).ok());
  EXPECT_EQ(store_.add("big", 1, soon()).status().code(), StatusCode::kFailedPrecondition);
}

TEST_P(StoreTest, OnlyTheFirstOfSetIfAbsentStands) {
  EXPECT_EQ(store_.set_if_absent("leader", "rank 3", soon()).value(), "rank 3");
  EXPECT_EQ(store_.set_if_absent("leader", "rank 5", soon()).value(), "rank 3");
}

TEST_P(StoreTest, KeysAndValuesHaveLimits) {
  EXPECT_EQ(store_.set(std::string(2000, 'k'), "x", soon()).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(store_.set("full", std::string(1 << 20, 'v'), soon()).ok());
  EXPECT_EQ(store_.get("full", soon()).value().size(), size_t{1} << 20);
  const Status beyond = store_.set("beyond", std::string((1 << 20) + 1, 'v'), soon());
  EXPECT_EQ(beyond.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(beyond.message(), testing::AllOf(testing::HasSubstr("1048577"), testing::HasSubstr("1048576")));
}

INSTANTIATE_TEST_SUITE_P(Kinds, StoreTest, testing::Values("local", "tcp", "prefix"),
                         [](const testing::TestParamInfo<std::string>& kind) { return kind.param; });

TEST(PrefixStoreTest, GenerationsDoNotSeeEachOther) {
  const auto base = create_local_store();
  const auto one = create_prefix_store(*base, "gen/1");
  const auto two = create_prefix_store(*base, "gen/2");
  EXPECT_TRUE(one->set("addr", "a", soon()).ok());
  EXPECT_TRUE(two->set("addr", "b", soon()).ok());
  EXPECT_EQ(one->get("addr", soon()).value(), "a");
  EXPECT_EQ(base->get("gen/2/addr", soon()).value(), "b");
}

TEST(TcpStoreTest, SixtyFourClientsMeet) {
  const auto server = std::move(StoreServer::start("127.0.0.1", 0)).value();
  constexpr int kClients = 64;
  std::vector<std::thread> clients;
  for (int c = 0; c < kClients; ++c) {
    clients.emplace_back([&, c] {
      const auto store = std::move(connect_store("127.0.0.1", server->port(), soon())).value();
      EXPECT_TRUE(store->set("addr/" + std::to_string(c), std::to_string(c * c), soon()).ok());
      for (int other = 0; other < kClients; ++other) {
        EXPECT_EQ(store->get("addr/" + std::to_string(other), soon()).value(), std::to_string(other * other));
      }
    });
  }
  for (auto& t : clients) t.join();
}

TEST(TcpStoreTest, ALostServerEndsCallsThatWait) {
  auto server = std::move(StoreServer::start("127.0.0.1", 0)).value();
  const int port = server->port();
  const auto store = std::move(connect_store("127.0.0.1", port, soon())).value();
  std::atomic<bool> begun{false};
  std::thread getter([&] {
    begun = true;
    const auto got = store->get("never", soon());
    EXPECT_EQ(got.status().code(), StatusCode::kUnavailable) << got.status().to_string();
  });
  while (!begun) std::this_thread::yield();
  server.reset();
  getter.join();
  EXPECT_EQ(store->set("x", "y", soon()).code(), StatusCode::kUnavailable);
  const auto late = connect_store("127.0.0.1", port, Deadline::after(milliseconds(50)));
  EXPECT_EQ(late.status().code(), StatusCode::kDeadlineExceeded) << late.status().to_string();
}

TEST(TcpStoreTest, AClientMayConnectBeforeTheServerStarts) {
  auto first = std::move(StoreServer::start("127.0.0.1", 0)).value();
  const int port = first->port();
  first.reset();
  std::thread client([&] {
    auto store = connect_store("127.0.0.1", port, soon());
    ASSERT_TRUE(store.ok()) << store.status().to_string();
    EXPECT_TRUE((*store)->set("k", "v", soon()).ok());
  });
  const auto second = StoreServer::start("127.0.0.1", port);
  ASSERT_TRUE(second.ok()) << second.status().to_string();
  client.join();
}

TEST(TcpStoreTest, ATakenPortIsSaid) {
  const auto server = std::move(StoreServer::start("127.0.0.1", 0)).value();
  const auto second = StoreServer::start("127.0.0.1", server->port());
  EXPECT_EQ(second.status().code(), StatusCode::kUnavailable);
  EXPECT_THAT(second.status().message(), testing::HasSubstr(std::to_string(server->port())));
}

TEST(StoreTableTest, AFullTableRefusesAndKeepsWhatItHas) {
  StoreTable table;
  const std::string value(1 << 20, 'v');
  Status last = ok_status();
  int stored = 0;
  while (last.ok()) last = table.set(std::to_string(stored++), value);
  EXPECT_EQ(last.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(stored, 256);  // 255 fit beside their keys
  EXPECT_NE(table.find("0"), nullptr);
  EXPECT_TRUE(table.set("0", "small").ok());
}

// A connection that sends what it likes.
class RawClient {
 public:
  explicit RawClient(int port) : socket_(std::move(connect_once("127.0.0.1", port, soon())).value()) {}
  void send(std::string_view bytes) { [[maybe_unused]] const Status may_be_closed = send_all(socket_, bytes, soon()); }
  // True when the server closes this connection; whatever it answers before is dropped.
  bool closed_by_server() {
    while (true) {
      auto byte = receive_exactly(socket_, 1, soon());
      if (!byte.ok()) return byte.status().code() == StatusCode::kUnavailable;
    }
  }
  void half_close() { ::shutdown(socket_.fd(), SHUT_WR); }

 private:
  Socket socket_;
};

TEST(TcpStoreTest, BrokenFramesCloseTheirOwnConnectionOnly) {
  const auto server = std::move(StoreServer::start("127.0.0.1", 0)).value();
  const auto store = std::move(connect_store("127.0.0.1", server->port(), soon())).value();
  EXPECT_TRUE(store->set("k", "v", soon()).ok());
  const std::string hello(kStoreHello);
  const std::string frames[] = {
      "GET / HTTP/1.1\r\n\r\n",                                                 // another protocol
      hello + std::string("\xff\xff\xff\xff", 4),                               // longer than allowed
      hello + std::string("\x00\x00\x00\x00", 4),                               // shorter than its own fields
      hello + std::string("\x07\x00\x00\x00\x09\x00\x00\x00\x00\x00\x00", 11),  // unknown operation
      hello + std::string("\x07\x00\x00\x00\x01\x00\x00\x00\x00\x05\x00", 11),  // key beyond the frame
  };
  for (const std::string& bytes : frames) {
    RawClient raw(server->port());
    raw.send(bytes);
    EXPECT_TRUE(raw.closed_by_server());
  }
  EXPECT_EQ(store->get("k", soon()).value(), "v");
}

TEST(TcpStoreTest, RandomBytesNeverHarmOthers) {
  const auto server = std::move(StoreServer::start("127.0.0.1", 0)).value();
  const auto store = std::move(connect_store("127.0.0.1", server->port(), soon())).value();
  EXPECT_TRUE(store->set("nobody guesses it", "v", soon()).ok());
  auto random = mutation::make_random();
  for (int round = mutation::rounds(300); round > 0; --round) {
    // Valid frames with some bytes changed, cut or repeated; keys outside the one that is checked.
    std::string bytes(random() % 4 == 0 ? "" : kStoreHello);
    for (unsigned frames = random() % 6; frames > 0; --frames) {
      bytes += encode_request({.op = static_cast<StoreOp>(1 + random() % 4),
                               .timeout_ms = static_cast<uint32_t>(random() % 5),
                               .key = "fuzz/" + std::to_string(random() % 3),
                               .value = std::string(random() % 40, 'z')});
    }
    for (unsigned changes = random() % 4; changes > 0 && bytes.size() > 40; --changes) {
      bytes[8 + random() % (bytes.size() - 8)] = static_cast<char>(random());
    }
    if (random() % 3 == 0) bytes.resize(random() % (bytes.size() + 1));
    RawClient raw(server->port());
    raw.send(bytes);
    if (random() % 2 == 0) raw.half_close();
  }
  EXPECT_EQ(store->add("nor this", 1, soon()).value(), 1);
  EXPECT_EQ(store->get("nobody guesses it", soon()).value(), "v");
}

// What listens at MASTER_PORT may be another program, or a server that breaks down.
TEST(TcpStoreTest, AnswersOfAStrangerAreErrorsOrValues) {
  auto random = mutation::make_random();
  const Socket listener = std::move(listen_on("127.0.0.1", 0)).value();
  std::atomic<bool> ended = false;
  std::thread stranger([&] {
    while (!ended) {
      pollfd waiting{.fd = listener.fd(), .events = POLLIN, .revents = 0};
      if (::poll(&waiting, 1, 10) < 1) continue;
      const Socket client(::accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!client.valid()) continue;
      std::string bytes = std::string(kStoreHello) +
                          encode_answer(static_cast<StatusCode>(random() % 12), std::string(random() % 20, 'v'));
      if (random() % 2 == 0) bytes = mutation::mutate_bytes(bytes, random);
      [[maybe_unused]] const Status sent = send_all(client, bytes, soon());
    }
  });
  const int port = port_of(listener).value();
  for (int round = mutation::rounds(300); round > 0; --round) {
    const auto store = connect_store("127.0.0.1", port, soon());
    if (!store.ok()) continue;
    const Result<std::string> value = (*store)->get("k", soon());
    EXPECT_TRUE(value.ok() || !value.status().to_string().empty());
    [[maybe_unused]] const auto count = (*store)->add("n", 1, soon());
  }
  ended = true;
  stranger.join();
}

TEST(WireTest, DecodingRandomBodiesGivesARequestOrAnError) {
  auto random = mutation::make_random();
  int decoded = 0;
  for (int round = mutation::rounds(20'000); round > 0; --round) {
    std::string body(random() % 64, '\0');
    for (char& c : body) c = static_cast<char>(random() % 3 == 0 ? random() : random() % 5);
    const auto request = decode_request(body);
    if (!request.ok()) {
      EXPECT_EQ(request.status().code(), StatusCode::kInvalidArgument);
      continue;
    }
    ++decoded;
    EXPECT_EQ(encode_request(*request).substr(4), body);
  }
  EXPECT_GT(decoded, 100);
}

TEST(WireTest, TheExampleOfTheProtocolIsRight) {
  const std::string frame = encode_request({.op = StoreOp::kSet, .timeout_ms = 1000, .key = "a", .value = "xyz"});
  EXPECT_EQ(frame, std::string("\x0b\x00\x00\x00\x01\xe8\x03\x00\x00\x01\x00"
                               "axyz",
                               15));
  EXPECT_EQ(encode_answer(StatusCode::kOk, ""), std::string("\x01\x00\x00\x00\x00", 5));
}

}  // namespace
}  // namespace kintsugi::comm
