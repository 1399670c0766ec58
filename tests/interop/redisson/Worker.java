import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.lang.reflect.Proxy;
import java.nio.charset.StandardCharsets;
import java.util.ArrayDeque;
import java.util.Arrays;
import java.util.Deque;
import java.util.HashMap;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import org.redisson.Redisson;
import org.redisson.api.RBucket;
import org.redisson.api.RFencedLock;
import org.redisson.api.RLock;
import org.redisson.api.RPermitExpirableSemaphore;
import org.redisson.api.RSemaphore;
import org.redisson.api.RedissonClient;
import org.redisson.client.RedisException;
import org.redisson.client.RedisNodeNotFoundException;
import org.redisson.client.codec.StringCodec;
import org.redisson.config.Config;
import org.redisson.config.ReadMode;

/**
 * Redisson's worker of the interop tests: speaks the protocol of ../README.md on stdin and stdout. Each task is a
 * thread, since a thread is an owner.
 */
public final class Worker {
    private static final TimeUnit MS = TimeUnit.MILLISECONDS;
    /** Redisson's lease for "until released". */
    private static final long WATCHDOG = -1;
    /** How long Redisson may know no master for a slot, in ns. */
    private static final long DISCOVERY = TimeUnit.SECONDS.toNanos(10);

    private static RedissonClient redisson;
    private static final Map<String, Task> tasks = new ConcurrentHashMap<>();

    public static void main(String[] args) throws Exception {
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            int end = line.startsWith("#") ? line.indexOf(' ') + 1 : 0;
            String request = line.substring(end);
            if (request.startsWith("connect ")) {
                connect(request.split(" "));
            } else {
                tasks.computeIfAbsent(line.substring(0, end), Task::started).requests.add(request);
            }
        }
        Runtime.getRuntime().halt(0);
    }

    /** CLOCK_MONOTONIC, as HotSpot has it on Linux. */
    private static long now() {
        return System.nanoTime();
    }

    private static synchronized void say(String answer) {
        System.out.println("@ " + answer.replace('\n', ' '));
        System.out.flush();
    }

    private static void connect(String[] words) {
        Config config = new Config();
        config.setThreads(4).setNettyThreads(2);
        for (String word : words) {
            long number = word.contains("=") ? Long.parseLong(word.substring(word.indexOf('=') + 1)) : 0;
            if (word.startsWith("redis://")) {
                config.useSingleServer().setAddress(word).setConnectionMinimumIdleSize(2);
            } else if (word.startsWith("redis-cluster://")) {
                String[] nodes = word.substring("redis-cluster://".length()).split(",");
                config.useClusterServers()
                        .addNodeAddress(Arrays.stream(nodes).map(node -> "redis://" + node).toArray(String[]::new))
                        .setMasterConnectionMinimumIdleSize(2)
                        .setReadMode(ReadMode.MASTER);
            } else if (word.startsWith("watchdog=")) {
                config.setLockWatchdogTimeout(number);
            } else if (word.startsWith("patience=")) {
                config.setFairLockWaitTimeout(number);
            }
        }
        try {
            redisson = Redisson.create(config);
            say("connected " + now());
        } catch (RuntimeException error) {
            say("error " + error);
        }
    }

    private static final class Task extends Thread {
        /** The prefix of its requests and replies. */
        private final String tag;
        private final BlockingQueue<String> requests = new LinkedBlockingQueue<>();

        private Task(String tag) {
            this.tag = tag;
        }

        static Task started(String tag) {
            Task task = new Task(tag);
            task.setDaemon(true);
            task.start();
            return task;
        }

        @Override
        public void run() {
            for (;;) {
                try {
                    answer(requests.take().split(" "), System.nanoTime() + DISCOVERY);
                } catch (Exception error) {
                    // what Redisson wraps is the reason
                    tell("error " + error + (error.getCause() == null ? "" : ": " + error.getCause()));
                }
            }
        }

        /**
         * When Redisson learns that a slot has moved, it takes it from the old master and then gives it to the new one.
         * It refuses a request in between before anything is sent, so the request can be retried.
         */
        private void answer(String[] words, long until) throws InterruptedException {
            for (;;) {
                try {
                    answer(words);
                    return;
                } catch (RedisException error) {
                    boolean isUnsent = error instanceof RedisNodeNotFoundException
                            || error.getCause() instanceof RedisNodeNotFoundException;
                    if (!isUnsent || System.nanoTime() > until) {
                        throw error;
                    }
                    TimeUnit.MILLISECONDS.sleep(10);
                }
            }
        }

        /** Whether it waits for the message that a lock is free: Redisson counts the same before it wakes all. */
        private boolean sleeps() {
            boolean waits = Arrays.asList(State.WAITING, State.TIMED_WAITING).contains(getState());
            return waits && Arrays.stream(getStackTrace())
                    .anyMatch(frame -> frame.getClassName().equals(Semaphore.class.getName()));
        }

        private void tell(String answer) {
            say(tag + answer);
        }

        private void answer(String[] words) throws InterruptedException {
            switch (words[0]) {
                case "acquire": {
                    boolean acquired = take(lock(words[1]), Long.parseLong(words[2]), words[3]) != null;
                    tell((acquired ? "acquired " : "busy ") + now());
                    break;
                }
                case "release": {
                    long at = now();
                    tell((released(lock(words[1])) ? "released " : "lost ") + at);
                    break;
                }
                case "reset": {
                    long at = now();
                    lock(words[1]).forceUnlock();
                    tell("reset " + at);
                    break;
                }
                case "look": {
                    RLock lock = lock(words[1]);
                    int locked = lock.isLocked() ? 1 : 0;
                    tell("sees " + locked + " " + lock.getHoldCount() + " " + lock.remainTimeToLive());
                    break;
                }
                case "count":
                    tell((redisson.getCountDownLatch(words[1]).trySetCount(Long.parseLong(words[2])) ? "counts " : "counted ") + now());
                    break;
                case "down": {
                    long at = now();
                    redisson.getCountDownLatch(words[1]).countDown();
                    tell("down " + at);
                    break;
                }
                case "await": {
                    boolean open = redisson.getCountDownLatch(words[1]).await(Long.parseLong(words[2]), MS);
                    tell((open ? "open " : "shut ") + now());
                    break;
                }
                case "asleep":
                    tell("asleep " + tasks.values().stream().filter(Task::sleeps).count());
                    break;
                case "run":
                    work(words[1], words[2], Integer.parseInt(words[3]), Long.parseLong(words[4]), words[5]);
                    break;
                default:
                    throw new IllegalArgumentException("unknown request " + words[0]);
            }
        }

        private void work(String name, String counter, int holds, long ttl, String seed) throws InterruptedException {
            Random random = new Random(Long.parseLong(seed));
            RBucket<String> count = redisson.getBucket(counter, StringCodec.INSTANCE);
            for (int hold = 0; hold < holds; hold++) {
                boolean side = random.nextBoolean();
                boolean shared = side && name.startsWith("read_write/");
                RLock lock = lock(name.replaceFirst("^read_write", side ? "read" : "write")
                        .replaceFirst("^rivals", side ? "fair" : "reentrant"));
                Long token = take(lock, ttl, "60000");
                long start = now();
                if (token == null) {
                    throw new IllegalStateException("busy for a minute");
                }
                String before = count.get();
                TimeUnit.MICROSECONDS.sleep(random.nextInt(500));
                if (!shared) {
                    count.set(String.valueOf(before == null ? 1 : Long.parseLong(before) + 1));
                } else if (!String.valueOf(before).equals(String.valueOf(count.get()))) {
                    throw new IllegalStateException("a write happened during a read hold");
                }
                long end = now();
                lock.unlock();
                String more = lock instanceof RFencedLock ? " " + token : "";
                tell((shared ? "shared " : "hold ") + start + " " + end + more);
                TimeUnit.MICROSECONDS.sleep(random.nextInt(2000));
            }
            tell("done " + holds);
        }
    }

    /** The kind is the prefix of the name. */
    private static RLock lock(String name) {
        String key = name.substring(name.indexOf('/') + 1);
        switch (name.substring(0, name.indexOf('/'))) {
            case "reentrant": return redisson.getLock(key);
            case "fair": return redisson.getFairLock(key);
            case "fenced": return redisson.getFencedLock(key);
            case "spin": return redisson.getSpinLock(key);
            case "read": return redisson.getReadWriteLock(key).readLock();
            case "write": return redisson.getReadWriteLock(key).writeLock();
            case "multi": return redisson.getMultiLock(redisson.getLock(key + ":1"), redisson.getLock(key + ":2"));
            case "permits": return permits(key, 1);
            case "permits3": return permits(key, 3);
            case "semaphore": return semaphore(key, 1);
            case "semaphore3": return semaphore(key, 3);
            default: throw new IllegalArgumentException("unknown kind of " + name);
        }
    }

    /** The ids of the permits that this task has, by the key of the semaphore. */
    private static final ThreadLocal<Map<String, Deque<String>>> ids = ThreadLocal.withInitial(HashMap::new);

    /** A semaphore as a lock: each hold is a permit of this task. */
    private static RLock permits(String key, int total) {
        RPermitExpirableSemaphore permits = redisson.getPermitExpirableSemaphore(key);
        permits.trySetPermits(total);
        Deque<String> mine = ids.get().computeIfAbsent(key, any -> new ArrayDeque<>());
        return (RLock) Proxy.newProxyInstance(Worker.class.getClassLoader(), new Class<?>[] {RLock.class}, (proxy, method, args) -> {
            switch (method.getName()) {
                case "tryLock": {
                    String id = args == null
                            ? permits.tryAcquire()
                            : permits.tryAcquire((long) args[0], (long) args[1], (TimeUnit) args[2]);
                    if (id != null) {
                        mine.push(id);
                    }
                    return id != null;
                }
                case "unlock":
                    if (mine.isEmpty() || !permits.tryRelease(mine.pop())) {
                        throw new IllegalMonitorStateException();
                    }
                    return null;
                default:
                    throw new UnsupportedOperationException(method.getName());
            }
        });
    }

    /** A semaphore without leases as a lock: what this task has taken, and not given back, is its own. */
    private static RLock semaphore(String key, int total) {
        RSemaphore semaphore = redisson.getSemaphore(key);
        semaphore.trySetPermits(total);
        Deque<String> mine = ids.get().computeIfAbsent(key, any -> new ArrayDeque<>());
        return (RLock) Proxy.newProxyInstance(Worker.class.getClassLoader(), new Class<?>[] {RLock.class}, (proxy, method, args) -> {
            switch (method.getName()) {
                case "tryLock": {
                    boolean acquired = args == null
                            ? semaphore.tryAcquire()
                            : semaphore.tryAcquire((long) args[0], (TimeUnit) args[2]);
                    if (acquired) {
                        mine.push("");
                    }
                    return acquired;
                }
                case "unlock":
                    if (mine.isEmpty()) {
                        throw new IllegalMonitorStateException();
                    }
                    mine.pop();
                    semaphore.release();
                    return null;
                default:
                    throw new UnsupportedOperationException(method.getName());
            }
        });
    }

    /** The token, 0 if there is none, or null if the lock is busy. */
    private static Long take(RLock lock, long ttl, String wait) throws InterruptedException {
        long lease = ttl == 0 ? WATCHDOG : ttl;
        if (lock instanceof RFencedLock) {
            // a negative wait has no limit
            return ((RFencedLock) lock).tryLockAndGetToken(wait.equals("own") ? -1 : Long.parseLong(wait), lease, MS);
        }
        if (wait.equals("own")) {
            lock.lock(lease, MS);
            return 0L;
        }
        boolean once = wait.equals("0") && ttl == 0;
        return (once ? lock.tryLock() : lock.tryLock(Long.parseLong(wait), lease, MS)) ? 0L : null;
    }

    private static boolean released(RLock lock) {
        try {
            lock.unlock();
            return true;
        } catch (IllegalMonitorStateException notHeld) {
            return false;
        }
    }
}
