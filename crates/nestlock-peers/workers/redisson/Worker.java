import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.atomic.AtomicReference;
import java.util.function.IntConsumer;
import org.redisson.Redisson;
import org.redisson.api.RLock;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

/** Redisson's worker of the peers: speaks the protocol of ../README.md on stdin and stdout. A thread is an owner. */
public final class Worker {
    private static RedissonClient redisson;
    private static int held;

    public static void main(String[] args) throws Exception {
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            String answer;
            try {
                answer = answer(line.split(" "));
            } catch (Exception error) {
                answer = "error " + error;
            }
            System.out.println("@ " + answer.replace('\n', ' '));
            System.out.flush();
        }
        Runtime.getRuntime().halt(0);
    }

    private static String answer(String[] words) throws Exception {
        switch (words[0]) {
            case "connect":
                Config config = new Config();
                config.useSingleServer().setAddress(words[1]);
                redisson = Redisson.create(config);
                return "connected " + Redisson.class.getPackage().getImplementationVersion() + ", Java "
                    + System.getProperty("java.version");
            case "pairs":
                return pairs(Integer.parseInt(words[1]), Long.parseLong(words[2]));
            case "lock":
                redisson.getLock(words[1]).lock();
                return "locked " + System.nanoTime(); // CLOCK_MONOTONIC, as HotSpot has it on Linux
            case "unlock":
                long at = System.nanoTime();
                redisson.getLock(words[1]).unlock();
                return "unlocked " + at;
            case "drain":
                return drain(words[1], Integer.parseInt(words[2]));
            case "hold":
                for (held = 0; held < Integer.parseInt(words[1]); held++) {
                    redisson.getLock("hold:" + held).lock();
                }
                return "held";
            case "free":
                while (held > 0) {
                    redisson.getLock("hold:" + --held).unlock();
                }
                return "freed";
            default:
                return "error unknown";
        }
    }

    private interface Join {
        void join() throws Exception;
    }

    /** Runs this many threads. An error in any of them is thrown. */
    private static Join together(int count, IntConsumer run) {
        AtomicReference<Throwable> failure = new AtomicReference<>();
        List<Thread> threads = new ArrayList<>();
        for (int number = 0; number < count; number++) {
            int mine = number;
            Thread thread = new Thread(() -> run.accept(mine));
            thread.setUncaughtExceptionHandler((who, error) -> failure.set(error));
            thread.start();
            threads.add(thread);
        }
        return () -> {
            for (Thread thread : threads) {
                thread.join();
            }
            if (failure.get() != null) {
                throw new Exception(failure.get());
            }
        };
    }

    private static String pairs(int tasks, long ms) throws Exception {
        double[][] samples = new double[tasks][];
        long start = System.nanoTime();
        long end = start + ms * 1_000_000;
        IntConsumer run = task -> {
            RLock lock = redisson.getLock("pairs:" + task);
            double[] micros = new double[1024];
            int count = 0;
            for (long before = System.nanoTime(); before < end; before = System.nanoTime()) {
                lock.lock();
                lock.unlock();
                if (count == micros.length) {
                    micros = Arrays.copyOf(micros, 2 * count);
                }
                micros[count++] = (System.nanoTime() - before) / 1e3;
            }
            samples[task] = Arrays.copyOf(micros, count);
        };
        if (tasks == 1) {
            run.accept(0);
        } else {
            together(tasks, run).join();
        }
        double elapsed = (System.nanoTime() - start) / 1e3;
        double[] micros = Arrays.stream(samples).flatMapToDouble(Arrays::stream).sorted().toArray();
        StringBuilder answer = new StringBuilder("pairs " + micros.length + " " + elapsed);
        for (double share : new double[] {0.5, 0.9, 0.99, 0.999}) {
            answer.append(' ').append(micros[(int) (micros.length * share)]);
        }
        return answer.toString();
    }

    private static String drain(String name, int waiters) throws Exception {
        RLock first = redisson.getLock(name);
        first.lock();
        Join all = together(waiters, number -> {
            RLock lock = redisson.getLock(name);
            lock.lock();
            lock.unlock();
        });
        Thread.sleep(400); // until all of them wait
        long start = System.nanoTime();
        first.unlock();
        all.join();
        return "drained " + (System.nanoTime() - start) / 1e3;
    }
}
