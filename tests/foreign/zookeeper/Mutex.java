// A worker of the benches: Curator's mutex. The lines and the log are those of benches/src/worker.rs.
//
// Mutex.java ADDRESS PATH TASKS MICROSECONDS OWN LOG: TASKS threads lock and unlock, and stay inside for so long. The lock is
// one for all, or with OWN = true one for each.

import java.io.BufferedReader;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.locks.LockSupport;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.RetryOneTime;

public class Mutex {
    public static void main(String[] args) throws Exception {
        int tasks = Integer.parseInt(args[2]);
        long body = Long.parseLong(args[3]) * 1000;
        boolean own = Boolean.parseBoolean(args[4]);
        CuratorFramework client =
            CuratorFrameworkFactory.newClient(args[0], 20000, 20000, new RetryOneTime(100));
        client.start();
        client.blockUntilConnected();
        System.out.println("ready");
        System.out.flush();
        String[] span = new BufferedReader(new InputStreamReader(System.in)).readLine().split(" ");
        // The clock of `nanoTime` is the one that all processes share.
        long begin = Long.parseLong(span[0]), end = Long.parseLong(span[1]);
        List<Thread> threads = new ArrayList<>();
        List<List<long[]>> logs = new ArrayList<>();
        for (int task = 0; task < tasks; task++) {
            int number = task;
            List<long[]> log = new ArrayList<>();
            logs.add(log);
            InterProcessMutex mutex =
                new InterProcessMutex(client, own ? args[1] + "-" + task : args[1]);
            Thread thread = new Thread(() -> {
                try {
                    LockSupport.parkNanos(begin - System.nanoTime());
                    for (long asked = System.nanoTime(); asked < end; asked = System.nanoTime()) {
                        mutex.acquire();
                        long entered = System.nanoTime();
                        if (body > 0) {
                            Thread.sleep(body / 1000000, (int) (body % 1000000));
                        }
                        long left = System.nanoTime();
                        mutex.release();
                        log.add(new long[] {number, asked, entered, left});
                    }
                } catch (Exception error) {
                    error.printStackTrace();
                    System.exit(1);
                }
            });
            threads.add(thread);
            thread.start();
        }
        for (Thread thread : threads) {
            thread.join();
        }
        try (FileChannel file = new FileOutputStream(args[5]).getChannel()) {
            for (List<long[]> log : logs) {
                for (long[] record : log) {
                    ByteBuffer bytes = ByteBuffer.allocate(32).order(ByteOrder.LITTLE_ENDIAN);
                    for (long word : record) {
                        bytes.putLong(word);
                    }
                    bytes.flip();
                    file.write(bytes);
                }
            }
        }
        client.close();
    }
}
